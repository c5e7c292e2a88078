"""Does memory creep up? By the trend of samples, not by a threshold: Theil-Sen's slope, Mann-Kendall's test. Pure.

A level may be anything; what makes a leak is that it keeps rising. A cache that fills rises as well, ever more slowly,
so the newer half must rise as steadily as the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    _Floats = numpy.typing.NDArray[numpy.float64]

WINDOW = 200  # samples that are looked at
FEWEST = 60  # below, no trend is claimed
# Standard deviations of Mann-Kendall's statistic; memory samples follow one another closely, so far beyond the 1.96
# that independent ones would ask for.
_SIGNIFICANT = 5.0
_SIGNIFICANT_HALF = 3.5
_STEADY_FRACTION = 0.5  # of the whole's slope that the newer half must keep
_RISING_QUARTERS = 4  # each quarter must end above where it began
_LEAST_GROWTH_BYTES = 4 * 1024**2  # over the window: an allocator's own grain is below


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at_s: float
    memory_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """`samples`: how many showed it; `growth_bytes`: by the slope, over their time."""

    bytes_per_s: float
    samples: int
    growth_bytes: float


def theil_sen(times_s: _Floats, values: _Floats) -> float:
    """The median slope of all pairs: a third of the samples may be outliers."""
    import numpy  # here as below: it takes 0.1 s of every start, and the first trend is asked for minutes later

    first, second = numpy.triu_indices(len(values), 1)
    spans = times_s[second] - times_s[first]
    kept = spans > 0
    return float(numpy.median((values[second] - values[first])[kept] / spans[kept])) if kept.any() else 0.0


def mann_kendall(values: _Floats) -> float:
    """The trend statistic in standard deviations, with the correction for ties; 0 where all are equal."""
    import numpy

    count = len(values)
    first, second = numpy.triu_indices(count, 1)
    score = float(numpy.sign(values[second] - values[first]).sum())
    _, ties = numpy.unique(values, return_counts=True)
    variance = (count * (count - 1) * (2 * count + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
    return (score - numpy.sign(score)) / variance**0.5 if variance > 0 else 0.0


def find_leak(samples: Sequence[Sample]) -> Leak | None:
    """A steady rise in the newest samples, or None. Times need not be even, but must not fall."""
    newest = samples[-WINDOW:]
    if len(newest) < FEWEST:
        return None
    import numpy

    times = numpy.array([sample.at_s for sample in newest])
    values = numpy.array([float(sample.memory_used_bytes) for sample in newest])
    half = len(newest) // 2
    if mann_kendall(values) < _SIGNIFICANT or mann_kendall(values[half:]) < _SIGNIFICANT_HALF:
        return None
    slope = theil_sen(times, values)
    growth = slope * (times[-1] - times[0])
    if growth < _LEAST_GROWTH_BYTES or theil_sen(times[half:], values[half:]) < slope * _STEADY_FRACTION:
        return None
    medians = [float(numpy.median(part)) for part in numpy.array_split(values, _RISING_QUARTERS)]
    if any(later <= earlier for earlier, later in pairwise(medians)):
        return None
    return Leak(bytes_per_s=slope, samples=len(newest), growth_bytes=growth)
