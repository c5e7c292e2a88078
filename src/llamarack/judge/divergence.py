"""Free-running comparison: where do two greedy answers part, and was it a coin that fell the other way? Pure.

After the first different token the two models read different texts, so nothing after it is compared; only lengths are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from llamarack.judge.forced import margin_of
from llamarack.judge.observation import Observation
from llamarack.measure.distribution import Interval

_Z = 1.959963984540054  # 97.5 % of the normal distribution


class Kind(StrEnum):
    """`tie`: the reference's own preference there is within the noise. `real`: it is not."""

    NONE = "none"
    TIE = "tie"
    REAL = "real"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """`index`: of the first different token, None where the answers are equal. `margin_nats`: the reference's
    preference for its own token over the candidate's, a lower bound where `is_margin_bound`.
    """

    question_id: str
    kind: Kind
    index: int | None
    reference_id: int | None
    candidate_id: int | None
    margin_nats: float | None
    is_margin_bound: bool
    reference_tokens: int
    candidate_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeRunStats:
    """`exact_interval`: Wilson, 95 %. `length_ratio`: mean candidate tokens / mean reference tokens."""

    questions: int
    exact: int
    exact_fraction: float | None
    exact_interval: Interval | None
    ties: int
    real: int
    first_divergence_min: int | None
    first_divergence_p50: float | None
    length_ratio: float | None


def first_divergence(reference: Observation, candidate: Observation, *, tie_nats: float) -> Divergence:
    a, b = reference.ids, candidate.ids
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    is_equal = common == len(a) == len(b)
    margin, is_bound = None, False
    other = b[common] if common < len(b) else None
    if common < len(a) and other is not None:
        margin, is_bound = margin_of(reference.positions[common], other)
    if is_equal:
        kind = Kind.NONE
    else:
        kind = Kind.TIE if margin is not None and not is_bound and margin <= tie_nats else Kind.REAL
    return Divergence(
        question_id=reference.question_id,
        kind=kind,
        index=None if is_equal else common,
        reference_id=a[common] if common < len(a) else None,
        candidate_id=other,
        margin_nats=margin,
        is_margin_bound=is_bound,
        reference_tokens=len(a),
        candidate_tokens=len(b),
    )


def free_run_stats(divergences: Sequence[Divergence]) -> FreeRunStats:
    exact = sum(one.kind is Kind.NONE for one in divergences)
    places = sorted(one.index for one in divergences if one.index is not None)
    ours = sum(one.reference_tokens for one in divergences)
    theirs = sum(one.candidate_tokens for one in divergences)
    middle = len(places) // 2
    return FreeRunStats(
        questions=len(divergences),
        exact=exact,
        exact_fraction=exact / len(divergences) if divergences else None,
        exact_interval=wilson(exact, len(divergences)),
        ties=sum(one.kind is Kind.TIE for one in divergences),
        real=sum(one.kind is Kind.REAL for one in divergences),
        first_divergence_min=places[0] if places else None,
        first_divergence_p50=(places[middle] + places[~middle]) / 2 if places else None,
        length_ratio=theirs / ours if ours else None,
    )


def wilson(successes: int, n: int) -> Interval | None:
    """95 % score interval of a proportion (Wilson 1927): sound also at 0 and n successes."""
    if n == 0:
        return None
    share, z2 = successes / n, _Z * _Z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At 0 and n successes the bound is the share itself; rounding would put it a hair beside.
    return Interval(low=max(0.0, min(centre - half, share)), high=min(1.0, max(centre + half, share)))
