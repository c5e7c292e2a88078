"""Where two sides' differences come from: the reference's own noise, batching, and what the sides differ in. Pure.

Every comparison is forced: both sides read the reference's tokens. The noise gives the bound of a tie, and ties are
then counted by that bound everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llamarack.judge.collection import Collection
from llamarack.judge.facts import factors_of
from llamarack.judge.forced import ForcedStats, forced_errors, forced_stats
from llamarack.judge.observation import Observation
from llamarack.judge.verify_result import Bounds, Drift


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`noise`: of the reference against itself; `noise_nats`: 99th percentile of its log-probability errors, None: not
    measured. `allowed_nats`, `allowed_kl`: what counts as noise: the reference's, and the candidate's own batching as
    far as rounding may explain it. `forced`: the candidate's passes on the reference's tokens. `alone`, `loaded`: the
    candidate against the reference, without and with other requests beside it; `batching`: its two passes against each
    other.
    """

    noise: tuple[Drift, ...]
    noise_nats: float | None
    allowed_nats: float
    allowed_kl: float
    tie_nats: float
    forced: Mapping[str, tuple[Observation, ...]]
    alone: ForcedStats
    loaded: ForcedStats | None
    batching: ForcedStats | None


def compared(reference: Collection, candidate: Collection, *, bounds: Bounds, seed: int) -> Comparison:
    """An engine whose sums have another order at every batch may still be quiet as a reference of one rank (vLLM in
    bfloat16 on a processor): its candidate of three ranks then shows by its own batching what its arithmetic leaves.
    """
    noise = _noise(reference, bounds.tie_nats, seed)
    measured = [one.stats.logprob_error_p99 for one in noise if one.stats.logprob_error_p99 is not None]
    noise_nats = max(measured, default=None)
    noise_kl = max((one.stats.kl_mean or 0.0 for one in noise), default=0.0)
    forced = _forced_by_id(reference, candidate)
    loaded = forced.get("loaded")
    own = None if loaded is None else _compare(forced["alone"], loaded, bounds.tie_nats, seed)
    own_nats, own_kl = (0.0, 0.0) if own is None else (own.logprob_error_p99 or 0.0, own.kl_mean or 0.0)
    allowed_nats = max(noise_nats or 0.0, min(own_nats, bounds.rounding_logprob_p99))
    tie_nats = max(bounds.tie_nats, 2 * allowed_nats)  # both tokens' log-probabilities may be off
    return Comparison(
        noise=_noise(reference, tie_nats, seed),
        noise_nats=noise_nats,
        allowed_nats=allowed_nats,
        allowed_kl=max(noise_kl, min(own_kl, bounds.rounding_kl)),
        tie_nats=tie_nats,
        forced=forced,
        alone=_compare(reference.greedy, forced["alone"], tie_nats, seed),
        loaded=None if loaded is None else _compare(reference.greedy, loaded, tie_nats, seed),
        batching=None if loaded is None else _compare(forced["alone"], loaded, tie_nats, seed),
    )


def drift_rows(both: Comparison, differing: Sequence[str]) -> tuple[Drift, ...]:
    """Noise first, then what the candidate adds. `differing`: names of the facts that the sides differ in."""
    rows = [*both.noise, Drift(factor=factor_name(differing), is_noise=False, stats=both.alone)]
    if both.batching is not None:
        rows.append(Drift(factor="batching", is_noise=False, stats=both.batching))
    return tuple(rows)


def factor_name(differing: Sequence[str]) -> str:
    """What the whole difference is put down to; several at once cannot be told apart by one comparison."""
    factors = [factor for factor in factors_of(differing) if factor != "settings"]
    return " + ".join(factors) if factors else "candidate against reference"


def _noise(reference: Collection, tie_nats: float, seed: int) -> tuple[Drift, ...]:
    names = {"again": "again", "loaded": "under load", "restarted": "after a restart"}
    return tuple(
        Drift(
            factor=names.get(name, name),
            is_noise=True,
            stats=_compare(reference.greedy, observed, tie_nats, seed),
        )
        for name, observed in reference.passes.items()
    )


def _compare(
    reference: Sequence[Observation], candidate: Sequence[Observation], tie_nats: float, seed: int
) -> ForcedStats:
    theirs = {one.question_id: one for one in candidate}
    errors = [forced_errors(one, theirs[one.question_id]) for one in reference if one.question_id in theirs]
    return forced_stats(errors, tie_nats=tie_nats, seed=seed)


def _forced_by_id(reference: Collection, candidate: Collection) -> Mapping[str, tuple[Observation, ...]]:
    """The candidate's forced passes on these very tokens. A saved run may have been forced on others: then each of
    its own answers counts as far as it says the same, and one token further.
    """
    wanted = {one.question_id: (one.prompt_ids, one.ids) for one in reference.greedy}
    kept = {
        name: tuple(o for o in passed if wanted.get(o.question_id) == (o.prompt_ids, o.ids))
        for name, passed in candidate.forced.items()
    }
    if kept.get("alone"):
        return {name: passed for name, passed in kept.items() if passed}
    own = {one.question_id: one for one in candidate.greedy}
    return {"alone": tuple(_as_forced(o, own[o.question_id]) for o in reference.greedy if o.question_id in own)}


def _as_forced(reference: Observation, own: Observation) -> Observation:
    positions = []
    if reference.prompt_ids == own.prompt_ids:
        for ours, theirs in zip(reference.positions, own.positions, strict=False):
            positions.append(replace(theirs, token_id=ours.token_id))
            if ours.token_id != theirs.token_id:
                break
    return replace(reference, positions=tuple(positions), text=None, finish_reason=None)
