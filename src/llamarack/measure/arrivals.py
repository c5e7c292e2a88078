"""When should requests be sent? Absolute offsets from the start, seeded, so that lateness never accumulates."""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import StrEnum


class Arrivals(StrEnum):
    CONSTANT = "constant"
    POISSON = "poisson"


def arrival_offsets_s(arrivals: Arrivals, rate_per_s: float, *, seed: int) -> Iterator[float]:
    """Without end. Every worker draws the whole schedule and takes its share, so all see the same one."""
    if arrivals is Arrivals.CONSTANT:
        number = 0
        while True:
            yield number / rate_per_s
            number += 1
    source = random.Random(seed)
    offset_s = 0.0
    while True:
        offset_s += source.expovariate(rate_per_s)
        yield offset_s
