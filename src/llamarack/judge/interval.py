"""How much worse is NEW than BASE, and how surely: ratios of repeats with an interval. Pure.

The unit is a repeat of a whole level, not a request: requests of one run share batches and a machine's mood, so an
interval over requests would be far too narrow. Ratios are taken on the log scale. With so few repeats no single method
can be trusted: the interval is the union of Student's t (Welch's, or paired where the runs were interleaved) and of a
bootstrap over repeats with its percentiles expanded for small n (Hesterberg 2015, "What teachers should know about the
bootstrap", section 5.2).

Interleaved runs are compared pair by pair. Where one side always comes first, a machine that warms up makes the other
look worse by one step of its drift: a straight line through the pairs over time is taken out, and its uncertainty
counts. A machine whose neighbours come and go drifts by steps, and a line through steps can make pairs look more alike
than they are: the interval is the union of the pairs' own and of those without the line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from llamarack.measure.distribution import Floats, Interval

MIN_REPEATS = 3
_RESAMPLES = 4000
_POWER = 0.8
_DRIFT_PAIRS = 4  # fewer do not carry a line


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
    times_s: tuple[Sequence[float], Sequence[float]] | None = None,
    seed: int = 0,
) -> Effect | None:
    """None under MIN_REPEATS a side or for values that have no ratio. `times_s`: when each repeat was taken."""
    if min(len(base), len(new)) < MIN_REPEATS or min(*base, *new) <= 0:
        return None
    sign = -1.0 if is_higher_better else 1.0
    a = sign * np.log(np.asarray(base, dtype=np.float64))
    b = sign * np.log(np.asarray(new, dtype=np.float64))
    is_paired = is_paired and len(a) == len(b)
    views = _paired_views(a, b, times_s, seed) if is_paired else [_unpaired_view(a, b, seed)]
    alpha, n = 1 - confidence, min(len(a), len(b))
    strict = alpha / max(1, checks)
    ends = [_bounds(view, alpha, n) for view in views]
    return Effect(
        worse_fraction=math.expm1(views[-1].middle),
        interval=Interval(low=math.expm1(min(low for low, _ in ends)), high=math.expm1(max(high for _, high in ends))),
        strict_low=math.expm1(min(_bounds(view, strict, n)[0] for view in views)),
        detectable_fraction=math.expm1(max(_reach(view, strict) for view in views)),
        is_paired=is_paired,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """One way to see a difference, on the log scale. `drawn`: means of resamples, `(resamples,)`."""

    middle: float
    error: float
    freedom: float
    drawn: Floats


def _paired_views(
    a: Floats, b: Floats, times_s: tuple[Sequence[float], Sequence[float]] | None, seed: int
) -> list[_View]:
    """Pairs as they are, then without the machine's drift."""
    views = [_pairs_view(b - a, 0.0, seed)]
    if times_s is not None and len(a) >= _DRIFT_PAIRS:
        views.append(_pairs_view(*_without_drift(b - a, (a + b) / 2, times_s), seed))
    return views


def _pairs_view(pairs: Floats, slope_error: float, seed: int) -> _View:
    error = math.hypot(float(pairs.std(ddof=1)) / math.sqrt(len(pairs)), slope_error)
    return _View(middle=float(pairs.mean()), error=error, freedom=float(len(pairs) - 1), drawn=_resampled(pairs, seed))


def _unpaired_view(a: Floats, b: Floats, seed: int) -> _View:
    error, freedom = _standard_error(a, b)
    drawn = _resampled(b, seed) - _resampled(a, seed + 1)
    return _View(middle=float(b.mean() - a.mean()), error=error, freedom=freedom, drawn=drawn)


def _reach(view: _View, strict: float) -> float:
    return (student_t(1 - strict / 2, view.freedom) + student_t(_POWER, view.freedom)) * view.error


def _without_drift(
    pairs: Floats, middles: Floats, times_s: tuple[Sequence[float], Sequence[float]]
) -> tuple[Floats, float]:
    """Differences of pairs without what the machine's drift adds to them, and the standard error of that."""
    first, second = (np.asarray(side, dtype=np.float64) for side in times_s)
    lags, at = second - first, (first + second) / 2
    at = at - at.mean()
    spread = float((at * at).sum())
    if spread == 0:
        return pairs, 0.0
    slope = float((at * middles).sum()) / spread
    rest = middles - middles.mean() - slope * at
    slope_error = math.sqrt(float((rest * rest).sum()) / (len(pairs) - 2) / spread)
    return pairs - slope * lags, abs(float(lags.mean())) * slope_error


def _resampled(values: Floats, seed: int) -> Floats:
    """Means of samples drawn with replacement, `(resamples,)`."""
    picked = np.random.default_rng(seed).integers(0, len(values), size=(_RESAMPLES, len(values)))
    return np.asarray(values[picked].mean(axis=1))


def _standard_error(a: Floats, b: Floats) -> tuple[float, float]:
    """And its degrees of freedom (Welch 1947)."""
    u, v = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    if u + v == 0:
        return 0.0, float(len(a) + len(b) - 2)
    return math.sqrt(u + v), (u + v) ** 2 / (u * u / (len(a) - 1) + v * v / (len(b) - 1))


def _bounds(view: _View, alpha: float, n: int) -> tuple[float, float]:
    half = student_t(1 - alpha / 2, view.freedom) * view.error
    expanded = NormalDist().cdf(math.sqrt(n / (n - 1)) * student_t(alpha / 2, n - 1))
    low, high = np.quantile(view.drawn, [expanded, 1 - expanded])
    return min(view.middle - half, float(low)), max(view.middle + half, float(high))


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
