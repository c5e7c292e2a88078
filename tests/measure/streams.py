"""Hand-made request records for tests: times in milliseconds after the scheduled time."""

from llamarack.measure.record import Chunk, ChunkKind, ErrorKind, Phase, RequestRecord

START_NS = 1_000_000_000_000


def at(milliseconds: float) -> int:
    return START_NS + round(milliseconds * 1e6)


def stream(
    *chunks: tuple[float, int | None] | tuple[float, int | None, ChunkKind],
    sent_ms: float = 0,
    first_event_ms: float | None = None,
    finished_ms: float | None = None,
    output_tokens: int | None = None,
    finish_reason: str | None = "length",
    error_kind: ErrorKind | None = None,
    phase: Phase = Phase.MEASURED,
    scheduled_ms: float = 0,
    cached_tokens: int | None = None,
    prompt_tokens: int | None = None,
) -> RequestRecord:
    made = tuple(Chunk(at(scheduled_ms + ms), tokens, *kind) for ms, tokens, *kind in chunks)
    last_ms = chunks[-1][0] if chunks else 0
    return RequestRecord(
        index=0,
        point=0,
        repeat=0,
        worker=0,
        phase=phase,
        prompt_id="p",
        scheduled_monotonic_ns=at(scheduled_ms),
        sent_monotonic_ns=at(scheduled_ms + sent_ms),
        first_event_monotonic_ns=None if first_event_ms is None else at(scheduled_ms + first_event_ms),
        finished_monotonic_ns=at(scheduled_ms + (last_ms if finished_ms is None else finished_ms)),
        chunks=made,
        num_events=len(made),
        finish_reason=finish_reason,
        http_status=200,
        num_prompt_tokens=prompt_tokens,
        num_output_tokens=output_tokens,
        num_cached_tokens=cached_tokens,
        error_kind=error_kind,
    )
