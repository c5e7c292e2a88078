"""A bench result as tables of text, for the terminal, Markdown and HTML alike. Unknown is `–`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamarack.measure.distribution import Interval, Summary
from llamarack.measure.point import PointResult
from llamarack.measure.result import BenchResult
from llamarack.units import format_count, format_duration, format_rate

UNKNOWN = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`note`: what a reader must know to read the figures right."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None = None


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
