"""A bench result as tables of text, for the terminal, Markdown and HTML alike. Unknown is `–`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamarack.measure.against_plan import Planned, PlannedRun
from llamarack.measure.distribution import Interval, Summary
from llamarack.measure.knee import KNEE_FRACTION, knee
from llamarack.measure.point import PointResult
from llamarack.measure.prediction import Compared
from llamarack.measure.result import BenchResult
from llamarack.units import format_bytes, format_count, format_duration, format_rate

UNKNOWN = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`note`: what a reader must know to read the figures right."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One figure that answers a question, for the top of a page."""

    name: str
    value: str
    detail: str


def headlines(result: BenchResult) -> tuple[Headline, ...]:
    """Of the valid levels: the highest rate, where more load stops paying, what a user waits, the best goodput."""
    valid = [point for point in result.points if point.valid and point.output_tokens_per_s is not None]
    found = [
        Headline(
            name="valid levels",
            value=f"{sum(point.valid for point in result.points)} of {len(result.points)}",
            detail=f"{sum(point.failures for point in result.points)} of "
            f"{format_count(sum(point.requests for point in result.points))} requests failed",
        )
    ]
    if not valid:
        return tuple(found)
    best = max(valid, key=lambda point: point.output_tokens_per_s or 0.0)
    rate = format_rate(best.output_tokens_per_s)
    found.append(Headline(name="highest rate", value=rate, detail=f"at {load_name(best)}"))
    knee_at = knee([_load(point) for point in valid], [point.output_tokens_per_s for point in valid])
    at = valid[knee_at] if knee_at is not None else valid[0]
    if knee_at is not None:
        detail = f"{KNEE_FRACTION:.0%} of the highest rate; more load only waits longer"
        found.append(Headline(name="knee", value=load_name(at), detail=detail))
    wait = format_duration(_first_token(at).p50)
    found.append(Headline(name="first token, p50", value=wait, detail=f"at {load_name(at)}"))
    per_token = format_duration(at.metrics.per_token_s.p50)
    found.append(Headline(name="per token, p50", value=per_token, detail=f"at {load_name(at)}"))
    good = max(valid, key=lambda point: point.goodput_requests_per_s or 0.0)
    if good.goodput is not None:
        detail = f"{good.goodput.attainment_fraction:.0%} kept {result.workload.slo}, at {load_name(good)}"
        value = format_rate(good.goodput.requests_per_s, "requests/s")
        found.append(Headline(name="best goodput", value=value, detail=detail))
    return tuple(found)


def _load(point: PointResult) -> float:
    return float(point.concurrency if point.concurrency is not None else point.rate_per_s or 0.0)


def overview(result: BenchResult) -> Table:
    """One row a load level."""
    columns: Sequence[tuple[str, Callable[[PointResult], str]]] = (
        ("load", load_name),
        ("requests", lambda p: format_count(p.requests)),
        ("failed", lambda p: format_count(p.failures)),
        ("first token p50", lambda p: format_duration(_first_token(p).p50)),
        ("p90", lambda p: format_duration(_first_token(p).p90)),
        ("p99", lambda p: format_duration(_first_token(p).p99)),
        ("per token p50", lambda p: format_duration(p.metrics.per_token_s.p50)),
        ("p90", lambda p: format_duration(p.metrics.per_token_s.p90)),
        ("tokens/s", lambda p: with_interval(p.output_tokens_per_s, p.output_tokens_per_s_interval)),
        ("goodput", goodput_text),
        ("running", running_text),
        ("verdict", lambda p: "valid" if p.valid else "INVALID"),
    )
    start = "scheduled" if any(point.rate_per_s is not None for point in result.points) else "sent"
    return Table(
        title="Load levels",
        headers=tuple(name for name, _ in columns),
        rows=tuple(tuple(cell(point) for _, cell in columns) for point in result.points),
        note=f"First-token times count from when a request was {start}. A quantile is shown only from the number of "
        "requests that supports it at 95 %: p50 from 5, p90 from 29, p95 from 59, p99 from 299. [a–b] is a 95 % "
        "interval. Running: mean / largest number of requests that the server itself reported.",
    )


def load_name(point: PointResult) -> str:
    if point.concurrency is not None:
        return f"{point.concurrency} at once"
    return f"{point.rate_per_s:g} requests/s"


def _first_token(point: PointResult) -> Summary:
    return point.metrics.ttft_s if point.rate_per_s is None else point.metrics.ttft_from_scheduled_s


def with_interval(value: float | None, interval: Interval | None) -> str:
    if value is None:
        return UNKNOWN
    if interval is None:
        return format_rate(value, "").strip()
    return " ".join(f"{value:,.1f} [{interval.low:,.1f}–{interval.high:,.1f}]".split())


def goodput_text(point: PointResult) -> str:
    if point.goodput is None:
        return UNKNOWN
    return f"{point.goodput.requests_per_s:.2f}/s ({point.goodput.attainment_fraction:.0%})"


def running_text(point: PointResult) -> str:
    servers = [repeat.server for repeat in point.repeats if repeat.server is not None]
    means = [server.running_mean for server in servers if server.running_mean is not None]
    largest = [server.running_max for server in servers if server.running_max is not None]
    return f"{sum(means) / len(means):.1f} / {max(largest):.0f}" if means and largest else UNKNOWN


def detail(point: PointResult) -> Table:
    """Every metric of one level."""
    metrics = point.metrics
    lines = (
        ("first token, from sent", metrics.ttft_s),
        ("first token, from scheduled", metrics.ttft_from_scheduled_s),
        ("first answer (reasoning left out)", metrics.first_answer_s),
        ("per token", metrics.per_token_s),
        ("between chunks", metrics.inter_chunk_s),
        ("end to end, from sent", metrics.end_to_end_s),
        ("end to end, from scheduled", metrics.end_to_end_from_scheduled_s),
        ("sent after schedule", metrics.schedule_delay_s),
    )
    packed = "" if point.tokens_per_chunk is None else f" A chunk holds {point.tokens_per_chunk:.2f} tokens on average."
    return Table(
        title=f"All times at {load_name(point)}",
        headers=("time", "n", "mean", "p50", "p90", "p95", "p99", "largest"),
        rows=tuple((name, *_summary_cells(summary)) for name, summary in lines),
        note=f"Of successful requests.{packed}",
    )


def _summary_cells(summary: Summary) -> tuple[str, ...]:
    values = (summary.mean, summary.p50, summary.p90, summary.p95, summary.p99, summary.max)
    return (format_count(summary.n), *(format_duration(value) for value in values))


def other_tools(point: PointResult) -> Table:
    return Table(
        title=f"The same requests in other tools' terms, at {load_name(point)}",
        headers=("tool", "its name", "its definition", "n", "mean", "p50"),
        rows=tuple(
            (
                t.tool,
                t.name,
                t.definition,
                format_count(t.summary.n),
                *map(format_duration, (t.summary.mean, t.summary.p50)),
            )
            for t in point.translations
        ),
        note="Only the definitions are applied to this run's stamps; the tools' own load and client are not imitated.",
    )


_PLAN_HEADERS = (
    *("load", "first token plan", "measured", "error", "per token plan", "measured", "error"),
    *("tokens/s plan", "measured", "error", "of bandwidth", "of arithmetic"),
)


def against_plan(result: BenchResult) -> Table | None:
    """What the plan said beside what was measured, and the share of the hardware's limit; None: it said nothing."""
    plan = result.plan
    if plan is None:
        return None
    rows = [
        _planned_row(point, planned)
        for point, planned in zip(result.points, plan.points, strict=True)
        if planned is not None and _says_something(planned)
    ]
    if not rows:
        return None
    return Table(title="Against the plan", headers=_PLAN_HEADERS, rows=tuple(rows), note=_plan_note(plan))


def _says_something(planned: Planned) -> bool:
    """A share of the limit may be known where no speed is predicted: an engine that counts its own work."""
    shares = (planned.limit.memory_bandwidth_fraction, planned.limit.arithmetic_fraction)
    return any(share is not None for share in shares) or any(each.predicted is not None for each in planned.compared)


def _planned_row(point: PointResult, planned: Planned) -> tuple[str, ...]:
    by_name = {each.name: each for each in planned.compared}
    cells = [load_name(point)]
    for name in ("first_token_s", "per_token_s", "tokens_per_s"):
        cells += _compared_cells(by_name.get(name))
    limit = planned.limit
    return (*cells, _share(limit.memory_bandwidth_fraction), _share(limit.arithmetic_fraction))


def _compared_cells(one: Compared | None) -> tuple[str, str, str]:
    if one is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    values = (one.predicted, one.measured)
    shown = [format_rate(v, "").strip() if one.name == "tokens_per_s" else format_duration(v) for v in values]
    return shown[0], shown[1], UNKNOWN if one.error_fraction is None else f"{one.error_fraction:+.0%}"


def _share(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{fraction:.0%}" if fraction >= 0.1 else f"{fraction:.1%}"


def _plan_note(plan: PlannedRun) -> str:
    rate = plan.memory_bandwidth_bytes_per_s
    limit = "whose memory bandwidth is not known (llamarack check measures a processor's)"
    if rate is not None:
        flop = "" if plan.flop_per_s is None else f" and {plan.flop_per_s / 1e12:,.0f} fp16 TFLOP/s"
        limit = f"with {rate / 1e9:,.1f} GB/s{flop} each"
    devices = f"{plan.devices} x {plan.device}" if plan.devices > 1 else plan.device
    counted = any(planned.limit.is_counted_by_engine for planned in plan.points if planned is not None)
    source = "The shares are the engine's own count. " if counted else ""
    learnt = (
        "No level was fit to learn from." if plan.lesson is None else "`llamarack plan` will go by what was learnt."
    )
    return (
        f"{plan.engine} {plan.engine_version or ''} on {devices}, {limit}. Error: measured over predicted, less one. "
        f"The plan is that of a closed loop. {source}{learnt}"
    )


def memory(result: BenchResult) -> Table | None:
    """What each card, or each replica on a processor, held during the run."""
    if not result.memory:
        return None
    rows = []
    for series in result.memory:
        of = UNKNOWN if series.total_bytes is None else f"{max(series.used_bytes) / series.total_bytes:.0%}"
        values = (series.used_bytes[0], max(series.used_bytes), series.used_bytes[-1])
        rows.append((series.name, *map(format_bytes, values), of))
    return Table(title="Memory", headers=("where", "first", "largest", "last", "of the card"), rows=tuple(rows))


def setting(result: BenchResult) -> Table:
    """What was run, against what, from where."""
    target, work, client = result.target, result.workload, result.environment
    lengths = f"{work.input_tokens} in, {work.output_tokens} out" if work.input_tokens else f"{work.output_tokens} out"
    exact = "exact" if work.is_fixed_length else "at most"
    rows = (
        ("target", target.url),
        ("model", target.model),
        ("load", f"{work.load}, {work.repeats} repeat(s), {work.workers} worker process(es)"),
        ("prompts", work.prompts if work.token_counter is None else f"{work.prompts}, counted by {work.token_counter}"),
        ("tokens", f"{lengths} ({exact})"),
        ("promise", work.slo or UNKNOWN),
        ("prompt cache", "wanted warm" if work.is_cache_wanted else "kept cold by a nonce"),
        ("round trip", format_duration(target.round_trip_s)),
        ("client", f"llamarack {client.llamarack_version}, Python {client.python_version}, Linux {client.kernel}"),
        ("client processors", f"{client.processors_usable} of {client.processors}"),
        ("seed", str(work.seed)),
    )
    return Table(title="Setting", headers=("what", "value"), rows=rows)


def reasons(result: BenchResult) -> tuple[str, ...]:
    """Why points are invalid, one line each, with the server's own words for the first failure."""
    lines = [f"{load_name(point)}: {reason}" for point in result.points for reason in point.invalid_reasons]
    lines += [
        f"{load_name(point)}: first failure: {point.first_failure}"
        for point in result.points
        if point.first_failure is not None
    ]
    return tuple(lines)
