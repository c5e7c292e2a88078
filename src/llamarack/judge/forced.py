"""Teacher-forced comparison: both models read the same tokens, so each position is judged by itself. Pure.

For each position: does the candidate prefer the same token, how far apart are the log-probabilities of the reference's
token, and how far apart are the distributions. Servers tell only their best tokens, so the divergence is that of the
two distributions with all untold tokens in one bin:

    KL = sum over tokens told by both of p log(p/q)  +  (1 - P) log((1 - P)/(1 - Q))

with P, Q the masses told by both. Merging outcomes never raises a KL divergence (data-processing inequality), so this
is a lower bound of the whole one; `covered_mass` (P) says how much of the reference it saw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamarack.judge.observation import Observation, Position
from llamarack.measure.distribution import CONFIDENCE, Interval

_RESAMPLES = 1000
_LEAST_MASS = 1e-9  # of the bin of untold tokens: servers round, so masses may sum to a little over 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionError:
    """`logprob_error`: of the reference's token, None where the candidate did not tell it. `margin`: how much the
    reference prefers its own best token to the candidate's best, in nats: 0 where they agree; a lower bound
    (`is_margin_bound`) where the reference did not tell the candidate's token.
    """

    index: int
    agrees: bool
    logprob_error: float | None
    kl: float
    covered_mass: float
    margin: float
    is_margin_bound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedStats:
    """Over all positions of all questions; intervals resample whole questions, whose positions are not independent.

    `untold`: positions whose token the candidate did not tell. `ties`, `real`: disagreements about the best token
    within, and beyond, `tie_nats` of the reference's own preference.
    """

    positions: int
    agreement: float | None
    agreement_interval: Interval | None
    ties: int
    real: int
    tie_nats: float
    logprob_error_mean: float | None
    logprob_error_p50: float | None
    logprob_error_p99: float | None
    logprob_error_max: float | None
    untold: int
    kl_mean: float | None
    kl_mean_interval: Interval | None
    kl_max: float | None
    covered_mass_mean: float | None


def position_error(reference: Position, candidate: Position, index: int) -> PositionError:
    ours, theirs = reference.logprob, candidate.logprob_of(reference.token_id)
    kl, mass = truncated_kl(reference, candidate)
    margin, is_bound = margin_of(reference, candidate.best_id)
    return PositionError(
        index=index,
        agrees=candidate.best_id == reference.best_id,
        logprob_error=None if ours is None or theirs is None else abs(ours - theirs),
        kl=kl,
        covered_mass=mass,
        margin=margin,
        is_margin_bound=is_bound,
    )


def truncated_kl(reference: Position, candidate: Position) -> tuple[float, float]:
    """Lower bound of KL(reference || candidate) in nats, and the reference's mass that both told."""
    theirs = {one.token_id: one.logprob for one in candidate.top}
    shared = [(one.logprob, theirs[one.token_id]) for one in reference.top if one.token_id in theirs]
    mass = math.fsum(math.exp(p) for p, _ in shared)
    other = math.fsum(math.exp(q) for _, q in shared)
    rest, other_rest = max(_LEAST_MASS, 1 - mass), max(_LEAST_MASS, 1 - other)
    kl = math.fsum(math.exp(p) * (p - q) for p, q in shared) + rest * math.log(rest / other_rest)
    return max(0.0, kl), min(1.0, mass)


def margin_of(reference: Position, token_id: int) -> tuple[float, bool]:
    """How much the reference prefers its best token to `token_id`; True: at least so much."""
    told = reference.logprob_of(token_id)
    if told is not None:
        return max(0.0, reference.top[0].logprob - told), False
    return reference.top[0].logprob - reference.top[-1].logprob, True


def forced_errors(reference: Observation, candidate: Observation) -> list[PositionError]:
    """Position by position as far as both go. Raises ValueError where the candidate was not forced on these tokens."""
    if reference.prompt_ids != candidate.prompt_ids or candidate.ids != reference.ids[: len(candidate.ids)]:
        raise ValueError(f"question {reference.question_id}: the two passes hold different tokens")
    return [
        position_error(a, b, index)
        for index, (a, b) in enumerate(zip(reference.positions, candidate.positions, strict=False))
    ]


def forced_stats(per_question: Sequence[Sequence[PositionError]], *, tie_nats: float, seed: int) -> ForcedStats:
    every = [error for question in per_question for error in question]
    errors = sorted(one.logprob_error for one in every if one.logprob_error is not None)
    flips = [one for one in every if not one.agrees]
    ties = sum(is_tie(one, tie_nats) for one in flips)
    return ForcedStats(
        positions=len(every),
        agreement=_mean([float(one.agrees) for one in every]),
        agreement_interval=_over_questions([[float(e.agrees) for e in one] for one in per_question], seed),
        ties=ties,
        real=len(flips) - ties,
        tie_nats=tie_nats,
        logprob_error_mean=_mean(errors),
        logprob_error_p50=_at(errors, 0.5),
        logprob_error_p99=_at(errors, 0.99),
        logprob_error_max=errors[-1] if errors else None,
        untold=len(every) - len(errors),
        kl_mean=_mean([one.kl for one in every]),
        kl_mean_interval=_over_questions([[e.kl for e in one] for one in per_question], seed),
        kl_max=max((one.kl for one in every), default=None),
        covered_mass_mean=_mean([one.covered_mass for one in every]),
    )


def is_tie(error: PositionError, tie_nats: float) -> bool:
    """The reference itself hardly prefers its token: any rounding may turn this one."""
    return not error.is_margin_bound and error.margin <= tie_nats


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _at(ordered: Sequence[float], q: float) -> float | None:
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)] if ordered else None


def _over_questions(per_question: Sequence[Sequence[float]], seed: int) -> Interval | None:
    """95 % percentile interval of the mean; None under two questions."""
    sums = np.array([math.fsum(values) for values in per_question if values])
    counts = np.array([len(values) for values in per_question if values])
    if len(sums) < 2:
        return None
    picked = np.random.default_rng(seed).integers(0, len(sums), size=(_RESAMPLES, len(sums)))
    means = sums[picked].sum(axis=1) / counts[picked].sum(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(low=float(low), high=float(high))
