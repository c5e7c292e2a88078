"""A soak as one self-contained page and as a table on the terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup
from rich.console import Console
from rich.markup import escape

from llamarack.measure.soak_result import SoakResult, to_json
from llamarack.report.chart import Chart, Line, svg
from llamarack.report.template import render
from llamarack.units import GIB, MIB, format_bytes, format_count, format_duration

RESULT_NAME = "soak.json"
_COLOURS = {"GO": "green", "NO-GO": "red", "INCONCLUSIVE": "yellow"}


def soak_html(result: SoakResult) -> str:
    started = datetime.fromtimestamp(result.started_unix_s, tz=UTC)
    return render(
        "soak.html",
        result=result,
        started=started.strftime("%Y-%m-%d %H:%M:%S UTC"),
        rows=rows(result),
        charts=[Markup(svg(chart)) for chart in charts(result)],
        data=to_json(result).decode(),
    )


def write_soak_report(result: SoakResult, folder: Path) -> Path:
    """`soak.json` and `soak.html`, whose path is returned."""
    (folder / RESULT_NAME).write_bytes(to_json(result))
    page = folder / "soak.html"
    page.write_text(soak_html(result), encoding="utf-8")
    return page


def rows(result: SoakResult) -> list[tuple[str, str]]:
    stalls = result.stalls
    found = [
        ("lasted", f"{format_duration(result.lasted_s)} of {format_duration(result.asked_s)}"),
        ("requests", f"{format_count(result.requests)}, {result.failures} failed"),
        ("output", f"{format_count(result.output_tokens)} tokens, {result.tokens_per_s:.1f} tokens/s"),
        ("drift of time per token", "–" if result.drift_fraction is None else f"{100 * result.drift_fraction:+.1f} %"),
        (
            "pauses over 100 ms",
            f"{stalls.count} in {format_count(stalls.probes)} looks, longest {format_duration(stalls.longest_s)}",
        ),
        ("out of memory", str(result.out_of_memory)),
        ("engines started again", "–" if result.restarts is None else str(result.restarts)),
        (
            "slots idle, at least",
            "–" if result.slots_idle_min is None else f"{result.slots_idle_min} of {result.slots_total}",
        ),
    ]
    for curve in result.memory:
        leak = curve.leak_bytes_per_h
        trend = "no steady rise" if leak is None else f"rises by {format_bytes(round(leak))} an hour"
        span = f"{format_bytes(curve.first_bytes)} to {format_bytes(curve.last_bytes)}"
        found.append((f"memory, {curve.name}", f"{span}, at most {format_bytes(curve.highest_bytes)}; {trend}"))
    found += [(f"event {kind}", str(count)) for kind, count in sorted(result.events.items())]
    found += [(f"error, {count} times", text) for text, count in result.errors.items()]
    return found


def charts(result: SoakResult) -> list[Chart]:
    unit, word, divisor = _time_unit(result.lasted_s)
    highest = max((curve.highest_bytes for curve in result.memory), default=0)
    size, size_word = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    memory = tuple(
        Line(name=curve.name, points=tuple((at / divisor, used / size) for at, used in curve.points))
        for curve in result.memory
    )
    first = tuple(
        (window.from_s / divisor, window.first_token_p50_s * 1e3)
        for window in result.latency
        if window.first_token_p50_s is not None
    )
    each = tuple(
        (window.from_s / divisor, window.per_token_p50_s * 1e3)
        for window in result.latency
        if window.per_token_p50_s is not None
    )
    found = [Chart(title="Memory", x_label=f"{word} ({unit})", y_label=size_word, lines=memory)] if memory else []
    return [
        *found,
        Chart(
            title="Median time to the first token",
            x_label=f"{word} ({unit})",
            y_label="ms",
            lines=(Line(name="first token", points=first),),
        ),
        Chart(
            title="Median time per token",
            x_label=f"{word} ({unit})",
            y_label="ms",
            lines=(Line(name="per token", points=each),),
        ),
    ]


def print_soak(result: SoakResult, console: Console) -> None:
    colour = _COLOURS[result.verdict]
    console.print(f"[bold {colour}]{result.verdict}[/]  {escape(result.model)} at {escape(result.url)}")
    for reason in result.reasons:
        console.print(f"  [{colour}]{escape(reason)}[/]")
    width = max(len(name) for name, _ in rows(result))
    for name, text in rows(result):
        console.print(f"  [dim]{escape(name):<{width}}[/]  {escape(text)}", highlight=False, soft_wrap=True)


def _time_unit(lasted_s: float) -> tuple[str, str, float]:
    if lasted_s >= 7200:
        return "h", "time", 3600.0
    return ("min", "time", 60.0) if lasted_s >= 300 else ("s", "time", 1.0)
