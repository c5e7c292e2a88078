"""The definitions: one request's raw stamps -> seconds. Pure; a metric that the stamps do not support is None.

    first token   first event with tokens (text, reasoning, a tool call) - sent. A role-only event is not a token.
    first answer  the same, reasoning left out.
    per token     (last - first token event) / (n - k): k tokens came with the first event, so n - k were waited for.
    inter chunk   gaps between neighbouring token events, whatever number of tokens each holds.
    end to end    last token event - sent. Usage, [DONE] and the close of the connection are no part of it.

`from scheduled` counts from when the load model wanted the request sent: what a user at that rate would have felt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llamarack.measure.distribution import Summary, summarize
from llamarack.measure.record import ChunkKind, RequestRecord

NANO = 1e-9
# Without a running count the divisor lies between chunks - 1 and n - 1; wider apart than this it is not known.
_DIVISOR_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """All in seconds. None: not defined (one token has no per-token time) or not known."""

    first_token_s: float | None
    first_token_from_scheduled_s: float | None
    first_answer_s: float | None
    per_token_s: float | None
    inter_chunk_s: tuple[float, ...]
    end_to_end_s: float | None
    end_to_end_from_scheduled_s: float | None
    schedule_delay_s: float | None


def request_times(record: RequestRecord) -> RequestTimes:
    sent, scheduled, chunks = record.sent_monotonic_ns, record.scheduled_monotonic_ns, record.chunks
    first = chunks[0].at_monotonic_ns if chunks else None
    last = chunks[-1].at_monotonic_ns if chunks else None
    answer = next((c.at_monotonic_ns for c in chunks if c.kind in (ChunkKind.ANSWER, ChunkKind.TOOL_CALL)), None)
    return RequestTimes(
        first_token_s=_seconds(sent, first),
        first_token_from_scheduled_s=_seconds(scheduled, first),
        first_answer_s=_seconds(sent, answer),
        per_token_s=per_token_s(record),
        inter_chunk_s=tuple((b.at_monotonic_ns - a.at_monotonic_ns) * NANO for a, b in pairwise(chunks)),
        end_to_end_s=_seconds(sent, last),
        end_to_end_from_scheduled_s=_seconds(scheduled, last),
        schedule_delay_s=_seconds(scheduled, sent),
    )


def _seconds(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None else (end - start) * NANO


def per_token_s(record: RequestRecord) -> float | None:
    waited = waited_tokens(record)
    if waited is None or len(record.chunks) < 2:
        return None
    return (record.chunks[-1].at_monotonic_ns - record.chunks[0].at_monotonic_ns) * NANO / waited


def waited_tokens(record: RequestRecord) -> int | None:
    """Tokens that arrived after the first token event.

    1. The server counted along: the counts of all events but the first, exactly.
    2. As many token events as tokens: each holds one.
    3. One event fewer, and the model stopped by itself: the missing one is the silent end token.
    4. Events and tokens within 5 %: n - 1.  Otherwise unknown.
    """
    counts = [chunk.tokens for chunk in record.chunks[1:]]
    if record.chunks and record.chunks[0].tokens is not None and None not in counts:
        return sum(count for count in counts if count is not None) or None
    chunks, tokens = len(record.chunks), record.num_output_tokens
    if tokens is None or chunks < 2 or tokens < chunks:
        return None
    if tokens == chunks or (tokens == chunks + 1 and record.finish_reason == "stop"):
        return chunks - 1
    return tokens - 1 if (tokens - 1) / (chunks - 1) - 1 <= _DIVISOR_TOLERANCE else None


def output_tokens(record: RequestRecord) -> int | None:
    """The server's total; for a stream that was cut off, the sum of its running counts."""
    if record.num_output_tokens is not None:
        return record.num_output_tokens
    counts = [chunk.tokens for chunk in record.chunks]
    return None if None in counts or not counts else sum(count for count in counts if count is not None)


def tokens_per_chunk(records: Iterable[RequestRecord]) -> float | None:
    """Mean over finished requests that have both numbers. 1.0: inter-chunk time is inter-token time."""
    pairs = [(output_tokens(r), len(r.chunks)) for r in records if not r.is_failure and r.chunks]
    known = [(tokens, chunks) for tokens, chunks in pairs if tokens is not None]
    return sum(tokens for tokens, _ in known) / sum(chunks for _, chunks in known) if known else None


def tokens_in_window(records: Sequence[RequestRecord], start_ns: int, end_ns: int) -> float | None:
    """Output tokens whose event arrived in the window, from requests of every phase: those that were cut short at
    the edge of the window count with what they delivered inside it. An event without a count weighs its own request's
    tokens per event, or the mean of the others; None when nothing gives a count.
    """
    overall = tokens_per_chunk(records)
    total = 0.0
    for record in records:
        tokens = output_tokens(record)
        weight = tokens / len(record.chunks) if tokens is not None and record.chunks else overall
        for chunk in record.chunks:
            if start_ns < chunk.at_monotonic_ns <= end_ns:
                share = chunk.tokens if chunk.tokens is not None else weight
                if share is None:
                    return None
                total += share
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Of the successful measured requests of one point; failures are counted beside, never averaged in."""

    ttft_s: Summary
    ttft_from_scheduled_s: Summary
    first_answer_s: Summary
    per_token_s: Summary
    inter_chunk_s: Summary
    end_to_end_s: Summary
    end_to_end_from_scheduled_s: Summary
    schedule_delay_s: Summary


def summarize_requests(records: Sequence[RequestRecord], *, seed: int = 0) -> Metrics:
    """`records`: any; failed ones are left out here and must be reported beside."""
    ordered = sorted((r for r in records if not r.is_failure), key=lambda r: r.scheduled_monotonic_ns)
    times = [request_times(record) for record in ordered]

    def summary(name: str) -> Summary:
        return summarize([value for t in times if (value := getattr(t, name)) is not None], seed=seed)

    return Metrics(
        ttft_s=summary("first_token_s"),
        ttft_from_scheduled_s=summary("first_token_from_scheduled_s"),
        first_answer_s=summary("first_answer_s"),
        per_token_s=summary("per_token_s"),
        # Gaps are many and come in runs from few requests: an interval over them would claim too much.
        inter_chunk_s=summarize([gap for t in times for gap in t.inter_chunk_s], with_intervals=False),
        end_to_end_s=summary("end_to_end_s"),
        end_to_end_from_scheduled_s=summary("end_to_end_from_scheduled_s"),
        schedule_delay_s=summary("schedule_delay_s"),
    )
