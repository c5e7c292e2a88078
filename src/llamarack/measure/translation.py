"""The same requests under other tools' names: why their number differs from ours on the same stream.

Definitions as read in each tool's source or documentation (vllm and sglang 2026, guidellm 2026-08, inference-perf
2026-08, AIPerf documentation 2026, LLMPerf 2024-12, MLPerf loadgen 2026-07). Only the definition is applied: what the
tools add by their own load model or client is not imitated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llamarack.measure.distribution import Summary, summarize
from llamarack.measure.metrics import NANO, output_tokens, request_times
from llamarack.measure.record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    tool: str
    name: str
    definition: str
    summary: Summary


def translate(records: Iterable[RequestRecord]) -> tuple[Translation, ...]:
    finished = [record for record in records if not record.is_failure and record.chunks]
    return tuple(
        Translation(
            tool=tool,
            name=name,
            definition=definition,
            summary=summarize([v for record in finished for v in values(record)], with_intervals=False),
        )
        for tool, name, definition, values in _DEFINITIONS
    )


def _span_s(start_ns: int | None, end_ns: int | None) -> list[float]:
    return [] if start_ns is None or end_ns is None else [(end_ns - start_ns) * NANO]


def _first_event(record: RequestRecord) -> list[float]:
    return _span_s(record.sent_monotonic_ns, record.first_event_monotonic_ns)


def _first_token(record: RequestRecord) -> list[float]:
    return _span_s(record.sent_monotonic_ns, record.chunks[0].at_monotonic_ns)


def _first_token_from_scheduled(record: RequestRecord) -> list[float]:
    return _span_s(record.scheduled_monotonic_ns, record.chunks[0].at_monotonic_ns)


def _gaps(record: RequestRecord) -> list[float]:
    return list(request_times(record).inter_chunk_s)


def _over_all_but_one(first: Callable[[RequestRecord], list[float]]) -> Callable[[RequestRecord], list[float]]:
    def values(record: RequestRecord) -> list[float]:
        tokens, end = output_tokens(record), _to_last_token(record)
        if tokens is None or tokens < 2:
            return []
        return [(e - f) / (tokens - 1) for e, f in zip(end, first(record), strict=False)]

    return values


def _to_last_token(record: RequestRecord) -> list[float]:
    return _span_s(record.sent_monotonic_ns, record.chunks[-1].at_monotonic_ns)


def _over_all_tokens(record: RequestRecord) -> list[float]:
    tokens = output_tokens(record)
    return [end / tokens for end in _to_last_token(record)] if tokens else []


def _whole_stream_over_tokens(record: RequestRecord) -> list[float]:
    tokens = output_tokens(record)
    return [s / tokens for s in _span_s(record.sent_monotonic_ns, record.finished_monotonic_ns)] if tokens else []


def _whole_stream_over_events(record: RequestRecord) -> list[float]:
    stream = _span_s(record.sent_monotonic_ns, record.finished_monotonic_ns)
    return [s / record.num_events for s in stream] if record.num_events else []


def _spread_over_tokens(record: RequestRecord) -> list[float]:
    gaps: list[float] = []
    for before, after in pairwise(record.chunks):
        if after.tokens is None:
            return []
        gap_s = (after.at_monotonic_ns - before.at_monotonic_ns) * NANO
        gaps += [gap_s / max(1, after.tokens)] * after.tokens
    return gaps


def _zero_inside_chunks(record: RequestRecord) -> list[float]:
    gaps: list[float] = []
    for before, after in pairwise(record.chunks):
        if after.tokens is None:
            return []
        gaps += [(after.at_monotonic_ns - before.at_monotonic_ns) * NANO] + [0.0] * max(0, after.tokens - 1)
    return gaps


_DEFINITIONS: Sequence[tuple[str, str, str, Callable[[RequestRecord], list[float]]]] = (
    ("vllm bench serve", "TTFT", "first event with a choice, role-only included", _first_event),
    ("vllm bench serve", "TPOT", "(end - TTFT) / (n - 1)", _over_all_but_one(_first_event)),
    ("vllm bench serve", "ITL", "gap between events, one sample per event", _gaps),
    ("sglang bench_serving", "TTFT", "first event with text", _first_token),
    ("sglang bench_serving", "ITL", "gap / tokens of the event, once per token", _spread_over_tokens),
    ("guidellm", "TPOT", "(last token - sent) / n, first token included", _over_all_tokens),
    ("guidellm", "ITL", "mean per request, (last - first) / (n - 1)", _over_all_but_one(_first_token)),
    ("AIPerf", "TTFT", "first event with text", _first_token),
    ("AIPerf", "inter-token latency", "mean per request, (end - TTFT) / (n - 1)", _over_all_but_one(_first_token)),
    ("AIPerf", "inter-chunk latency", "gap between events", _gaps),
    ("inference-perf", "ITL", "gap to the event's first token, 0 for its others", _zero_inside_chunks),
    ("inference-perf", "NTPOT", "whole stream / n", _whole_stream_over_tokens),
    ("LLMPerf", "inter-token latency", "whole stream / number of events", _whole_stream_over_events),
    ("MLPerf loadgen", "TTFT", "first token from the scheduled time", _first_token_from_scheduled),
    ("MLPerf loadgen", "TPOT", "(end - first token) / (n - 1)", _over_all_but_one(_first_token)),
)
