"""How much worse is NEW than BASE, and how surely: ratios of repeats with an interval. Pure.

The unit is a repeat of a whole level, not a request: requests of one run share batches and a machine's mood, so an
interval over requests would be far too narrow. Ratios are taken on the log scale. With so few repeats no single method
can be trusted: the interval is the union of Student's t (Welch's, or paired where the runs were interleaved) and of a
bootstrap over repeats with its percentiles expanded for small n (Hesterberg 2015, "What teachers should know about the
bootstrap", section 5.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from llamarack.measure.distribution import Interval

MIN_REPEATS = 3
_RESAMPLES = 4000
_POWER = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """`worse_fraction`: 0.1 is 10 % worse. `interval`: at the asked confidence. `strict_low`: lower end of the wider
    interval that counts every check of the comparison. `detectable_fraction`: the worsening that these repeats would
    have shown to be above 0 in four of five cases.
    """

    worse_fraction: float
    interval: Interval
    strict_low: float
    detectable_fraction: float
    is_paired: bool


def effect_of(
    base: Sequence[float],
    new: Sequence[float],
    *,
    is_higher_better: bool,
    is_paired: bool,
    confidence: float,
    checks: int,
    seed: int = 0,
) -> Effect | None:
    """None under MIN_REPEATS a side or for values that have no ratio."""
    if min(len(base), len(new)) < MIN_REPEATS or min(*base, *new) <= 0:
        return None
    sign = -1.0 if is_higher_better else 1.0
    a = sign * np.log(np.asarray(base, dtype=np.float64))
    b = sign * np.log(np.asarray(new, dtype=np.float64))
    is_paired = is_paired and len(a) == len(b)
    middle = float(b.mean() - a.mean())
    error, freedom = _standard_error(a, b, is_paired)
    alpha = 1 - confidence
    low, high = _bounds(a, b, middle, error, freedom, alpha, is_paired, seed)
    strict_low, _ = _bounds(a, b, middle, error, freedom, alpha / max(1, checks), is_paired, seed)
    reach = (student_t(1 - alpha / max(1, checks) / 2, freedom) + student_t(_POWER, freedom)) * error
    return Effect(
        worse_fraction=math.expm1(middle),
        interval=Interval(low=math.expm1(low), high=math.expm1(high)),
        strict_low=math.expm1(strict_low),
        detectable_fraction=math.expm1(reach),
        is_paired=is_paired,
    )


def _standard_error(a: np.ndarray, b: np.ndarray, is_paired: bool) -> tuple[float, float]:
    """And its degrees of freedom (Welch 1947)."""
    if is_paired:
        return float((b - a).std(ddof=1) / math.sqrt(len(a))), float(len(a) - 1)
    u, v = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    if u + v == 0:
        return 0.0, float(len(a) + len(b) - 2)
    return math.sqrt(u + v), float((u + v) ** 2 / (u * u / (len(a) - 1) + v * v / (len(b) - 1)))


def _bounds(
    a: np.ndarray, b: np.ndarray, middle: float, error: float, freedom: float, alpha: float, is_paired: bool, seed: int
) -> tuple[float, float]:
    half = student_t(1 - alpha / 2, freedom) * error
    n = min(len(a), len(b))
    expanded = NormalDist().cdf(math.sqrt(n / (n - 1)) * student_t(alpha / 2, n - 1))
    random = np.random.default_rng(seed)
    ours = random.integers(0, len(a), size=(_RESAMPLES, len(a)))
    theirs = ours if is_paired else random.integers(0, len(b), size=(_RESAMPLES, len(b)))
    drawn = b[theirs].mean(axis=1) - a[ours].mean(axis=1)
    low, high = np.quantile(drawn, [expanded, 1 - expanded])
    return min(middle - half, float(low)), max(middle + half, float(high))


@lru_cache(maxsize=512)
def student_t(probability: float, freedom: float) -> float:
    """Quantile of Student's distribution, by bisection on its integral (Simpson); within 1e-6."""
    if probability < 0.5:
        return -student_t(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _t_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(x: float, freedom: float) -> float:
    # The substitution t = sqrt(freedom) tan(a) makes the integrand cos^(freedom - 1), smooth on a bounded range.
    end = math.atan(x / math.sqrt(freedom))
    angles = np.linspace(0.0, end, 2001)
    values = np.cos(angles) ** (freedom - 1)
    area = (values[0] + values[-1] + 4 * values[1::2].sum() + 2 * values[2:-1:2].sum()) * end / 2000 / 3
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return 0.5 + scale * float(area)
