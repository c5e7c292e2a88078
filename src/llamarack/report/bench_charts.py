"""Which charts a bench result has: rates and waiting against load, spread of the per-token time, course in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from llamarack.measure.knee import KNEE_FRACTION, knee
from llamarack.measure.metrics import NANO, per_token_s, request_times, tokens_in_window
from llamarack.measure.point import PointResult, window_ns
from llamarack.measure.rack import MemorySeries
from llamarack.measure.record import Phase, RequestRecord
from llamarack.measure.result import BenchResult
from llamarack.report.bench_rows import load_name
from llamarack.report.chart import Chart, Line, Point
from llamarack.units import format_bytes, format_duration

_MAX_DOTS = 2000  # per line; a report of a long run stays small enough to open
_NUM_BINS = 60


def bench_charts(result: BenchResult, records: Sequence[RequestRecord]) -> tuple[tuple[Chart, ...], tuple[Chart, ...]]:
    """Those of the whole run, and the course of each level."""
    by_point: dict[int, list[RequestRecord]] = {}
    for record in records:
        by_point.setdefault(record.point, []).append(record)
    named = [(load_name(point), by_point.get(number, [])) for number, point in enumerate(result.points)]
    whole = (
        throughput(result.points),
        first_token(result.points),
        per_token_spread(named),
        pareto(result.points),
        *promise(result.points),
        *per_token_against_plan(result),
        *memory(result.memory, _spans(named)),
    )
    return whole, tuple(chart for name, kept in named for chart in course(name, kept))


def _seconds(stamps_ns: Sequence[int], start_ns: int) -> list[float]:
    return [(at - start_ns) * NANO for at in stamps_ns]


def _spans(named: Sequence[tuple[str, Sequence[RequestRecord]]]) -> list[tuple[int, str]]:
    """When each level began, by its first measured request."""
    windows = [(name, window_ns([record for record in kept if record.repeat == 0])) for name, kept in named]
    return [(window[0], name) for name, window in windows if window is not None]


def promise(points: Sequence[PointResult]) -> tuple[Chart, ...]:
    """Where a promise was given: requests per second, and those of them that kept it."""
    kept = [point for point in points if point.goodput is not None and point.requests_per_s is not None]
    if not kept:
        return ()

    def line(name: str, value: Callable[[PointResult], float | None]) -> Line:
        return Line(name=name, points=tuple((_load(p), value(p) or 0.0) for p in kept), hollow=_hollow(kept))

    return (
        Chart(
            title="Requests per second",
            x_label=_x_label(points),
            y_label="requests/s",
            lines=(
                line("finished", lambda point: point.requests_per_s),
                line("kept the promise", lambda point: point.goodput_requests_per_s),
            ),
            x_is_log=True,
            marks=_knee_mark(points),
        ),
    )


def per_token_against_plan(result: BenchResult) -> tuple[Chart, ...]:
    """Where there was a plan: its per-token time beside the median measured."""
    if result.plan is None:
        return ()
    both = [
        (point, each.predicted, each.measured)
        for point, planned in zip(result.points, result.plan.points, strict=True)
        if planned is not None
        for each in planned.compared
        if each.name == "per_token_s" and each.predicted is not None and each.measured is not None
    ]
    if not both:
        return ()
    planned = Line(name="plan", points=tuple((_load(point), said) for point, said, _ in both))
    hollow = _hollow([point for point, _, _ in both])
    measured = Line(name="measured, p50", points=tuple((_load(point), seen) for point, _, seen in both), hollow=hollow)
    return (
        Chart(
            title="Per-token time: plan and measured",
            x_label=_x_label(result.points),
            y_label="time",
            lines=(measured, planned),
            x_is_log=True,
            format_y=_time,
        ),
    )


def memory(series: Sequence[MemorySeries], levels: Sequence[tuple[int, str]]) -> tuple[Chart, ...]:
    """Over the whole run, with the beginning of each level; cards with what they have."""
    if not any(series):
        return ()
    start = min(each.at_monotonic_ns[0] for each in series)
    lines = [
        Line(
            name=each.name,
            points=tuple(zip(_seconds(each.at_monotonic_ns, start), map(float, each.used_bytes), strict=True)),
            style="step",
        )
        for each in series
    ]
    return (
        Chart(
            title="Memory along the whole run",
            x_label="seconds",
            y_label="memory",
            lines=tuple(lines),
            format_y=_bytes,
            marks=tuple(((at - start) * NANO, name.removesuffix(" at once")) for at, name in levels if at >= start),
            y_is_bytes=True,
        ),
    )


def _load(point: PointResult) -> float:
    return float(point.concurrency if point.concurrency is not None else point.rate_per_s or 0.0)


def _x_label(points: Sequence[PointResult]) -> str:
    return "requests per second" if any(point.rate_per_s is not None for point in points) else "requests at once"


def _knee_mark(points: Sequence[PointResult]) -> tuple[tuple[float, str], ...]:
    """Of the valid levels: an invalid one proves nothing about where the knee is."""
    points = [point for point in points if point.valid]
    at = knee([_load(point) for point in points], [point.output_tokens_per_s for point in points])
    if at is None:
        return ()
    return ((_load(points[at]), f"knee: {KNEE_FRACTION:.0%} of the best rate"),)


def _time(seconds: float) -> str:
    """Short enough for an axis: `4 s`, `2.5 s`, `500 ms`."""
    if seconds == 0:
        return "0"
    number, _, unit = format_duration(seconds).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}".strip()


def _bytes(count: float) -> str:
    return "0" if count == 0 else format_bytes(count).replace(".0 ", " ")


def _hollow(points: Sequence[PointResult]) -> frozenset[int]:
    return frozenset(number for number, point in enumerate(points) if not point.valid)


def throughput(points: Sequence[PointResult]) -> Chart:
    known = [p for p in points if p.output_tokens_per_s is not None]
    line = Line(
        name="output tokens/s",
        points=tuple((_load(p), p.output_tokens_per_s or 0.0) for p in known),
        whiskers=tuple((_load(p), i.low, i.high) for p in known if (i := p.output_tokens_per_s_interval) is not None),
        hollow=_hollow(known),
    )
    return Chart(
        title="Output tokens per second, with 95 % intervals (hollow: invalid)",
        x_label=_x_label(points),
        y_label="tokens/s",
        lines=(line,),
        x_is_log=True,
        marks=_knee_mark(points),
    )


def first_token(points: Sequence[PointResult]) -> Chart:
    def line(name: str) -> Line:
        def value(p: PointResult) -> float | None:
            summary = p.metrics.ttft_s if p.rate_per_s is None else p.metrics.ttft_from_scheduled_s
            return {"p50": summary.p50, "p90": summary.p90}[name]

        known = [p for p in points if value(p) is not None]
        return Line(name=name, points=tuple((_load(p), value(p) or 0.0) for p in known), hollow=_hollow(known))

    return Chart(
        title="First token",
        x_label=_x_label(points),
        y_label="time",
        lines=(line("p50"), line("p90")),
        x_is_log=True,
        format_y=_time,
        marks=_knee_mark(points),
    )


def per_token_spread(named: Sequence[tuple[str, Sequence[RequestRecord]]]) -> Chart:
    lines = []
    for name, records in named:
        measured = (r for r in records if r.phase is Phase.MEASURED and not r.is_failure)
        lines.append(
            Line(name=name, points=ecdf([v for r in measured if (v := per_token_s(r)) is not None]), style="step")
        )
    return Chart(
        title="Per-token time: share of requests at or below",
        x_label="time per token",
        y_label="share",
        lines=tuple(lines),
        x_from_zero=False,
        format_x=_time,
        format_y="{:.0%}".format,
    )


def ecdf(values: Sequence[float]) -> tuple[Point, ...]:
    """Starts at share 0, so that the first step is seen; thinned to `_MAX_DOTS` for large samples."""
    if not values:
        return ()
    ordered, n = sorted(values), len(values)
    stride = max(1, n // _MAX_DOTS)
    kept = [*range(0, n - 1, stride), n - 1]
    return ((ordered[0], 0.0), *((ordered[i], (i + 1) / n) for i in kept))


def pareto(points: Sequence[PointResult]) -> Chart:
    known = [
        (p, 1 / p.metrics.per_token_s.p50, p.output_tokens_per_s)
        for p in points
        if p.metrics.per_token_s.p50 and p.output_tokens_per_s is not None
    ]
    line = Line(
        name="load levels",
        points=tuple((of_one, of_all) for _, of_one, of_all in known),
        labels=tuple(f"{_load(p):g}" for p, _, _ in known),
        hollow=_hollow([p for p, _, _ in known]),
    )
    return Chart(
        title="One user against all users",
        x_label="tokens/s of one user (1 / per-token p50)",
        y_label="tokens/s of all",
        lines=(line,),
    )


def course(name: str, records: Sequence[RequestRecord]) -> tuple[Chart, ...]:
    """Of the level's first repeat: its rate and its first-token times along its window."""
    first = [record for record in records if record.repeat == 0]
    window = window_ns(first)
    if window is None:
        return ()
    start, end = window
    edges = [start + (end - start) * i // _NUM_BINS for i in range(_NUM_BINS + 1)]
    bin_s = (end - start) * NANO / _NUM_BINS
    rates = []
    for low, high in pairwise(edges):
        tokens = tokens_in_window(first, low, high)
        if tokens is not None:
            rates.append(((low - start) * NANO, tokens / bin_s))
    waits = [
        ((r.sent_monotonic_ns - start) * NANO, times)
        for r in first
        if r.phase is Phase.MEASURED and not r.is_failure and r.sent_monotonic_ns is not None
        and (times := request_times(r).first_token_s) is not None
    ]  # fmt: skip
    thinned = waits[:: max(1, len(waits) // _MAX_DOTS)]
    return (
        Chart(
            title=f"Rate along the run, {name}",
            x_label="seconds",
            y_label="tokens/s",
            lines=(Line(name="tokens/s", points=tuple(rates), style="step"),),
        ),
        Chart(
            title=f"First token along the run, {name}",
            x_label="seconds (when sent)",
            y_label="time",
            lines=(Line(name="first token", points=tuple(thinned), style="dots"),),
            format_y=_time,
        ),
    )
