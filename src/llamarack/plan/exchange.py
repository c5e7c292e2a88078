"""How long cards take to sum one message (all-reduce), by link and number of cards, from measured tables. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from math import exp, log

from llamarack.hardware.machine import Card, LinkKind
from llamarack.plan.engine_data import data_file

_ORDER = list(LinkKind)


def worst_link(cards: Sequence[Card]) -> LinkKind:
    """The slowest link inside a group; a link nobody reported counts as PCIe through the host."""
    if len(cards) < 2:
        return LinkKind.NVLINK
    kinds = [_link(a, b) for a in cards for b in cards if a.index < b.index]
    return max(kinds, key=_ORDER.index)


def _link(one: Card, other: Card) -> LinkKind:
    for link in one.links:
        if link.peer_index == other.index:
            return link.kind
    return LinkKind.PCIE_HOST


def all_reduce_s(cards: Sequence[Card], message_bytes: float, *, eager: bool = False) -> float:
    """Time of one all-reduce over `cards`; 0 for one card. `eager`: outside a CUDA graph."""
    if len(cards) < 2:
        return 0.0
    table = data_file("speed.yaml")["all_reduce"]
    seconds = _interpolated(_table_name(cards), _measured_degree(len(cards)), message_bytes)
    return seconds + (table["eager_us"] * 1e-6 if eager else 0.0)


def _table_name(cards: Sequence[Card]) -> str:
    if worst_link(cards) is not LinkKind.NVLINK:
        return "pcie"
    majors = [card.compute_capability[0] for card in cards if card.compute_capability]
    return "nvlink_9" if majors and min(majors) >= 9 else "nvlink_8"


def _measured_degree(cards: int) -> int:
    return next((degree for degree in (2, 4, 8) if cards <= degree), 8)


@cache
def _points(name: str, degree: int) -> tuple[tuple[float, float], ...]:
    table = data_file("speed.yaml")["all_reduce"]
    pairs = zip(table["message_bytes"], table[name][degree], strict=True)
    return tuple((log(size), log(micros * 1e-6)) for size, micros in pairs if micros is not None)


def _interpolated(name: str, degree: int, message_bytes: float) -> float:
    """Straight lines between measured points in log-log; beyond the last point time grows with size."""
    points = _points(name, degree)
    at = log(max(message_bytes, 1.0))
    if at <= points[0][0]:
        return exp(points[0][1])
    if at >= points[-1][0]:
        return exp(points[-1][1] + at - points[-1][0])
    right = bisect_left(points, (at,))
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return exp(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
