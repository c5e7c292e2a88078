"""The raw records of one load level -> its figures and its verdict. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llamarack.measure.counters import ServerCounters
from llamarack.measure.distribution import Interval, Summary, mean_interval, summarize
from llamarack.measure.metrics import (
    NANO,
    Metrics,
    output_tokens,
    summarize_requests,
    tokens_in_window,
    tokens_per_chunk,
)
from llamarack.measure.record import Phase, RequestRecord
from llamarack.measure.slo import Goodput, Slo, goodput
from llamarack.measure.translation import Translation, translate
from llamarack.measure.validity import (
    PointFacts,
    cached_fraction,
    coalesced_fraction,
    invalid_reasons,
    wrong_length_fraction,
)
from llamarack.measure.worker import WorkerReport

_SLICES = 20  # of a window, for the interval of its throughput
# Student's t, 97.5 %, by degrees of freedom; more repeats take the last, which is a little too wide.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One load level. One of `concurrency` (closed loop) and `rate_per_s` (open loop) is set."""

    concurrency: int | None = None
    rate_per_s: float | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return f"{self.rate_per_s:g} requests/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one repeat of one level left behind."""

    records: tuple[RequestRecord, ...]
    workers: tuple[WorkerReport, ...]
    counters: ServerCounters | None
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    duration_s: float | None
    output_tokens_per_s: float | None
    output_tokens_per_s_interval: Interval | None
    requests_per_s: float | None
    server: ServerCounters | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """`requests`: measured attempts, failures among them. Figures pool the repeats; rates are their mean, and with
    three repeats or more the interval is over repeats, else over slices of the one window.
    """

    concurrency: int | None
    rate_per_s: float | None
    requests: int
    failures: int
    failures_by_kind: Mapping[str, int]
    first_failure: str | None
    valid: bool
    invalid_reasons: tuple[str, ...]
    metrics: Metrics
    output_tokens_per_s: float | None
    output_tokens_per_s_interval: Interval | None
    requests_per_s: float | None
    goodput_requests_per_s: float | None
    goodput: Goodput | None
    input_tokens: Summary
    output_tokens: Summary
    cached_fraction: float | None
    tokens_per_chunk: float | None
    client_lag_p99_s: float | None
    client_cpu_fraction: float | None
    connect_p50_s: float | None
    translations: tuple[Translation, ...]
    repeats: tuple[Repeat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """How a point is judged, the same for all points of a run."""

    slo: Slo | None
    is_fixed_length: bool
    is_cache_wanted: bool
    template_tokens: int
    round_trip_s: float | None
    seed: int


def point_result(level: Level, measured: Sequence[Measured], judging: Judging) -> PointResult:
    kept = [record for each in measured for record in each.records if record.phase is Phase.MEASURED]
    counted = [record for record in kept if not record.is_cancelled]
    failed = [record for record in counted if record.is_failure]
    metrics = summarize_requests(counted, seed=judging.seed)
    repeats = tuple(_repeat(each, judging.seed) for each in measured)
    rates = [each.output_tokens_per_s for each in repeats]
    kept_promise = _goodput(level, counted, repeats, judging)
    facts = _facts(level, measured, counted, metrics, judging)
    reasons = invalid_reasons(facts)
    finished = [record for record in counted if not record.is_failure]
    return PointResult(
        concurrency=level.concurrency,
        rate_per_s=level.rate_per_s,
        requests=len(counted),
        failures=len(failed),
        failures_by_kind=dict(Counter(str(record.error_kind) for record in failed)),
        first_failure=failed[0].error_detail if failed else None,
        valid=not reasons,
        invalid_reasons=reasons,
        metrics=metrics,
        output_tokens_per_s=_mean(rates),
        output_tokens_per_s_interval=_interval(repeats),
        requests_per_s=_mean([each.requests_per_s for each in repeats]),
        goodput_requests_per_s=None if kept_promise is None else kept_promise.requests_per_s,
        goodput=kept_promise,
        input_tokens=_counts([record.num_prompt_tokens for record in finished]),
        output_tokens=_counts([output_tokens(record) for record in finished]),
        cached_fraction=facts.cached_fraction,
        tokens_per_chunk=tokens_per_chunk(counted),
        client_lag_p99_s=facts.lag_p99_s,
        client_cpu_fraction=facts.cpu_fraction,
        connect_p50_s=summarize([s for m in measured for w in m.workers for s in w.connect_s]).p50,
        translations=translate(counted),
        repeats=repeats,
    )


def window_ns(records: Sequence[RequestRecord]) -> tuple[int, int] | None:
    """From the first measured send to the last measured end: the load is at its level all the time between."""
    sent = [r.sent_monotonic_ns for r in records if r.phase is Phase.MEASURED and r.sent_monotonic_ns is not None]
    ended = [r.finished_monotonic_ns for r in records if r.phase is Phase.MEASURED and not r.is_cancelled]
    return (min(sent), max(ended)) if sent and ended and max(ended) > min(sent) else None


def _repeat(measured: Measured, seed: int) -> Repeat:
    window = window_ns(measured.records)
    if window is None:
        nothing = {"duration_s": None, "output_tokens_per_s": None, "requests_per_s": None}
        return Repeat(**nothing, output_tokens_per_s_interval=None, server=measured.counters)
    duration_s = (window[1] - window[0]) * NANO
    tokens = tokens_in_window(measured.records, *window)
    slices = _slices(measured.records, window, _SLICES)
    interval = None if slices is None else mean_interval(slices, seed=seed)
    done = sum(r.phase is Phase.MEASURED and not r.is_failure and not r.is_cancelled for r in measured.records)
    return Repeat(
        duration_s=duration_s,
        output_tokens_per_s=None if tokens is None else tokens / duration_s,
        output_tokens_per_s_interval=interval,
        requests_per_s=done / duration_s,
        server=measured.counters,
    )


def _slices(records: Sequence[RequestRecord], window: tuple[int, int], number: int) -> list[float] | None:
    """Tokens per second in equal parts of the window."""
    start, end = window
    edges = [start + (end - start) * i // number for i in range(number + 1)]
    tokens = [tokens_in_window(records, a, b) for a, b in pairwise(edges)]
    seconds = (end - start) * NANO / number
    known = [each / seconds for each in tokens if each is not None]
    return known if len(known) == number else None


def _facts(
    level: Level, measured: Sequence[Measured], counted: Sequence[RequestRecord], metrics: Metrics, judging: Judging
) -> PointFacts:
    workers = [worker for each in measured for worker in each.workers]
    lags = [worker.lag.event_loop_s for worker in workers]
    # With too few samples for a p99 the largest stands in for it: stricter, never looser.
    lag_values = [lag.p99 if lag.p99 is not None else lag.max for lag in lags]
    cpu = [worker.lag.cpu_fraction for worker in workers if worker.lag.cpu_fraction is not None]
    delay = metrics.schedule_delay_s
    halves = [_halves(each) for each in measured]
    return PointFacts(
        concurrency=level.concurrency,
        rate_per_s=level.rate_per_s,
        requests=len(counted),
        failures=sum(record.is_failure for record in counted),
        first_token_p50_s=metrics.ttft_s.p50,
        lag_p99_s=max((lag for lag in lag_values if lag is not None), default=None),
        cpu_fraction=max(cpu, default=None),
        schedule_delay_p99_s=delay.p99 if delay.p99 is not None else delay.max,
        delivered_fraction=min((f for m in measured if (f := _delivered(m.records)) is not None), default=None),
        round_trip_s=judging.round_trip_s,
        cached_fraction=cached_fraction(counted, template_tokens=judging.template_tokens),
        is_cache_wanted=judging.is_cache_wanted,
        wrong_length_fraction=wrong_length_fraction(counted) if judging.is_fixed_length else None,
        coalesced_fraction=coalesced_fraction(counted),
        tokens_per_s_halves=_worst(halves),
        is_interrupted=any(each.is_interrupted for each in measured),
    )


def _halves(measured: Measured) -> tuple[float, float] | None:
    """Tokens per second in each half of the window. A request's tokens count evenly over the whole time that it took,
    its wait for the first token too: by their moments of arrival, slots that run in step would put a round more into
    one half than into the other. A request that was cut off at the end counts as the finished ones do on average.
    """
    window = window_ns(measured.records)
    finished = [r for r in measured.records if not r.is_failure and not r.is_cancelled and output_tokens(r)]
    if window is None or not finished:
        return None
    speed = sum(output_tokens(r) or 0 for r in finished) / sum(map(_took_ns, finished))
    middle = (window[0] + window[1]) // 2

    def rate(start_ns: int, end_ns: int) -> float:
        tokens = sum((output_tokens(r) or 0) / _took_ns(r) * _overlap_ns(r, start_ns, end_ns) for r in finished)
        cut_off = [r for r in measured.records if r.is_cancelled]
        tokens += sum(speed * _overlap_ns(r, start_ns, end_ns) for r in cut_off)
        return tokens / (end_ns - start_ns) / NANO

    return rate(window[0], middle), rate(middle, window[1])


def _took_ns(record: RequestRecord) -> int:
    return max(1, record.finished_monotonic_ns - (record.sent_monotonic_ns or record.scheduled_monotonic_ns))


def _overlap_ns(record: RequestRecord, start_ns: int, end_ns: int) -> int:
    sent_ns = record.sent_monotonic_ns or record.scheduled_monotonic_ns
    return max(0, min(end_ns, record.finished_monotonic_ns) - max(start_ns, sent_ns))


def _worst(halves: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    known = [pair for pair in halves if pair is not None and min(pair) > 0]
    return max(known, key=lambda pair: abs(math.log(pair[1] / pair[0])), default=None)


def _delivered(records: Sequence[RequestRecord]) -> float | None:
    """The time that the schedule gave to its requests / the time it took to send them."""
    measured = [r for r in records if r.phase is Phase.MEASURED]
    scheduled = [r.scheduled_monotonic_ns for r in measured]
    sent = [r.sent_monotonic_ns for r in measured if r.sent_monotonic_ns is not None]
    if len(sent) < 2 or max(scheduled) == min(scheduled):
        return None
    return (max(scheduled) - min(scheduled)) / (max(*sent, max(scheduled)) - min(scheduled))


def _goodput(
    level: Level, counted: Sequence[RequestRecord], repeats: Sequence[Repeat], judging: Judging
) -> Goodput | None:
    durations = [each.duration_s for each in repeats if each.duration_s is not None]
    if judging.slo is None or not durations:
        return None
    is_open = level.rate_per_s is not None
    return goodput(counted, judging.slo, duration_s=sum(durations), from_scheduled=is_open, seed=judging.seed)


def _interval(repeats: Sequence[Repeat]) -> Interval | None:
    rates = [each.output_tokens_per_s for each in repeats if each.output_tokens_per_s is not None]
    if len(rates) < 3:
        return repeats[0].output_tokens_per_s_interval if len(repeats) == 1 else None
    mean = sum(rates) / len(rates)
    deviation = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1))
    half = _T_975[min(len(rates) - 1, len(_T_975)) - 1] * deviation / math.sqrt(len(rates))
    return Interval(low=mean - half, high=mean + half)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _counts(values: Sequence[int | None]) -> Summary:
    return summarize([float(value) for value in values if value is not None], with_intervals=False)
