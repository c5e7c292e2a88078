"""Charts as inline SVG: axes, lines, steps, dots, whiskers. Colours come from the page's style sheet, so that one
drawing serves light and dark. No library: the page must open in ten years.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 84, 26, 34, 48
LEGEND_ROW, CHARACTER = 18, 6.6  # height of a row of the legend, mean width of a letter at its size
NUM_COLOURS = 8

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`whiskers`: x, low, high. `labels`: one a point, or none. `hollow`: points drawn as not counting."""

    name: str
    points: tuple[Point, ...]
    style: Literal["line", "step", "dots"] = "line"
    whiskers: tuple[tuple[float, float, float], ...] = ()
    labels: tuple[str, ...] = ()
    hollow: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`marks`: a vertical line at x with its text. `x_is_log`: for loads that double. `y_is_bytes`: ticks at whole
    binary units.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_is_log: bool = False
    x_from_zero: bool = True
    format_x: Callable[[float], str] = "{:,g}".format
    format_y: Callable[[float], str] = "{:,g}".format
    marks: tuple[tuple[float, str], ...] = ()
    y_is_bytes: bool = False

    @property
    def has_points(self) -> bool:
        return any(line.points for line in self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        if self.is_log:
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def svg(chart: Chart) -> str:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    ys += [bound for line in chart.lines for _, low, high in line.whiskers for bound in (low, high)]
    if not xs:
        body = f'<text class="axis" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">nothing to show</text>'
    else:
        x, x_ticks = _x_scale(xs, chart)
        y_ticks = byte_ticks(max(ys)) if chart.y_is_bytes else nice_ticks(0.0, max(*ys, 1e-12))
        legend, top = _legend(chart)
        y = _Scale(low=0.0, high=max(y_ticks[-1], max(ys)), start=HEIGHT - BOTTOM, end=top)
        body = _axes(chart, x, x_ticks, y, y_ticks) + _marks(chart, x, top)
        body += "".join(_line(line, number, x, y) for number, line in enumerate(chart.lines))
        body += legend
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title, quote=True)}">'
        f'<text class="title" x="{LEFT}" y="18">{escape(chart.title)}</text>{body}</svg>'
    )


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover the range."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def byte_ticks(high: float) -> list[float]:
    """Multiples of a power of two, from 0."""
    step = 2.0 ** math.ceil(math.log2(max(high, 1.0) / 5))
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def _x_scale(xs: Sequence[float], chart: Chart) -> tuple[_Scale, list[float]]:
    low, high = min(xs), max(xs)
    if chart.x_is_log:
        ticks = sorted(set(xs))
        if low == high:
            low, high = low / 2, high * 2
        return _Scale(low=low / 1.1, high=high * 1.1, start=LEFT, end=WIDTH - RIGHT, is_log=True), ticks
    ticks = nice_ticks(0.0 if chart.x_from_zero else low, high)
    return _Scale(low=ticks[0], high=max(ticks[-1], high), start=LEFT, end=WIDTH - RIGHT), ticks


def _axes(chart: Chart, x: _Scale, x_ticks: Sequence[float], y: _Scale, y_ticks: Sequence[float]) -> str:
    parts = []
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        label = escape(chart.format_y(tick))
        parts.append(f'<text class="axis" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in x_ticks:
        label = escape(chart.format_x(tick))
        middle = f'x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle"'
        parts.append(f'<text class="axis" {middle}>{label}</text>')
    parts.append(
        f'<line class="frame" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
    )
    centre = f'x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle"'
    parts.append(f'<text class="axis" {centre}>{escape(chart.x_label)}</text>')
    turned = f'transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text class="axis" {turned}>{escape(chart.y_label)}</text>')
    return "".join(parts)


def _marks(chart: Chart, x: _Scale, top: float) -> str:
    parts = []
    for at, text in chart.marks:
        place = x(at)
        is_right = place > (LEFT + WIDTH - RIGHT) / 2
        anchor = f'x="{place - 5:.1f}" text-anchor="end"' if is_right else f'x="{place + 5:.1f}"'
        parts.append(
            f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{top}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="axis" {anchor} y="{top + 12}">{escape(text)}</text>'
        )
    return "".join(parts)


def _line(line: Line, number: int, x: _Scale, y: _Scale) -> str:
    colour = f"c{number % NUM_COLOURS}"
    places = [(x(a), y(b)) for a, b in line.points]
    drawn = "".join(
        f'<line class="{colour} whisker" x1="{x(a):.1f}" x2="{x(a):.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}"/>'
        for a, low, high in line.whiskers
    )
    if line.style != "dots" and len(places) > 1:
        corners = places
        if line.style == "step":
            corners = [places[0]]
            for (_, before), (a, b) in pairwise(places):
                corners += [(a, before), (a, b)]
        drawn += f'<polyline class="{colour}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}"/>'
    if line.style != "step":
        radius = 2 if line.style == "dots" else 3
        for i, (a, b) in enumerate(places):
            fill = f"{colour} hollow" if i in line.hollow else colour
            drawn += f'<circle class="{fill}" cx="{a:.1f}" cy="{b:.1f}" r="{radius}"/>'
    for (a, b), label in zip(places, line.labels, strict=False):
        drawn += f'<text class="axis" x="{a + 6:.1f}" y="{b - 6:.1f}">{escape(label)}</text>'
    return drawn


def _legend(chart: Chart) -> tuple[str, float]:
    """Rows under the title, and where the frame starts below them."""
    if len(chart.lines) < 2:
        return "", TOP
    parts, left, y = [], float(LEFT), TOP
    for number, line in enumerate(chart.lines):
        width = CHARACTER * len(line.name) + 24
        if left > LEFT and left + width > WIDTH - RIGHT:
            left, y = float(LEFT), y + LEGEND_ROW
        parts.append(
            f'<circle class="c{number % NUM_COLOURS} key" cx="{left + 4:.0f}" cy="{y - 4}" r="4"/>'
            f'<text class="axis" x="{left + 12:.0f}" y="{y}">{escape(line.name)}</text>'
        )
        left += width
    return "".join(parts), y + LEGEND_ROW
