"""Where does more load stop paying? Pure."""

from __future__ import annotations

from collections.abc import Sequence

# A level that gives nine tenths of the best rate: beyond it, waiting grows faster than work done. The figure is this
# project's own choice; reports print it beside the mark.
KNEE_FRACTION = 0.9


def knee(loads: Sequence[float], rates: Sequence[float | None]) -> int | None:
    """Index of the smallest load that reaches `KNEE_FRACTION` of the best rate. None under two known levels."""
    known = [(load, rate, i) for i, (load, rate) in enumerate(zip(loads, rates, strict=True)) if rate is not None]
    if len(known) < 2:
        return None
    best = max(rate for _, rate, _ in known)
    return min((load, i) for load, rate, i in known if rate >= KNEE_FRACTION * best)[1]
