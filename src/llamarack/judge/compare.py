"""BASE against NEW through gates: GO, NO-GO or INCONCLUSIVE. Pure.

A regression gate says NO-GO only where three things hold: the worsening is above the practical threshold, its interval
(widened for the number of checks) is above zero, and the difference is above the absolute floor. It says GO only where
the whole interval is below the threshold, or the difference below the floor. What lies between is INCONCLUSIVE: these
repeats cannot tell, and the answer says what they could have told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from llamarack.errors import UsageError
from llamarack.judge.bench_run import BenchRun, Difference, is_interleaved, unlike
from llamarack.judge.facts import differences
from llamarack.judge.gates import HIGHER_IS_BETTER, Gate, Gates
from llamarack.judge.interval import MIN_REPEATS, Effect, effect_of
from llamarack.judge.verify_result import VerifyResult
from llamarack.measure.distribution import Interval

SCHEMA_VERSION = 1
# Facts that make two records records of one deployment; hosts and flags may have moved on between them.
_IDENTITY = frozenset({"model_sha256", "weights", "tokenizer_sha256", "chat_template_sha256", "engine", "kv_dtype"})
_IDENTITY |= {"tensor_parallel", "pipeline_parallel", "split_mode"}


class Decision(StrEnum):
    GO = "GO"
    NO_GO = "NO-GO"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        return {Decision.GO: 0, Decision.NO_GO: 6, Decision.INCONCLUSIVE: 7}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """One gate at one level. `measured`: worsening or improvement as a fraction, or the value itself for a limit.
    `detectable`: the smallest worsening that these repeats would have shown.
    """

    gate: str
    metric: str
    level: float | None
    decision: Decision
    reason: str
    base: float | None
    new: float | None
    measured: float | None
    bound: float | None
    interval: Interval | None
    detectable: float | None
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareResult:
    """`verdict`: the worst of the gates."""

    schema_version: int = SCHEMA_VERSION
    verdict: Decision
    base: str
    new: str
    gates_name: str
    confidence: float
    gates: tuple[GateResult, ...]
    differences: tuple[Difference, ...]
    is_interleaved: bool
    consistency: str | None
    notes: tuple[str, ...]
    finished_unix_s: float


def compare(
    base: BenchRun,
    new: BenchRun,
    gates: Gates,
    *,
    gates_name: str,
    allowed: Sequence[str] = (),
    allow_unlike: bool = False,
    consistency: VerifyResult | None = None,
    finished_unix_s: float,
    seed: int = 0,
) -> CompareResult:
    """Raises UsageError for runs that are not alike, unless each difference is allowed."""
    found = unlike(base, new)
    meant = {*allowed, *gates.allow_different}
    refused = [one for one in found if one.name not in meant]
    if refused and not allow_unlike:
        listed = "; ".join(f"{one.name}: {one.base} against {one.new}" for one in refused)
        flags = " ".join(f"--allow {name}" for name in dict.fromkeys(one.name for one in refused))
        raise UsageError(f"`{base.name}` and `{new.name}` are not alike: {listed}", hint=f"if that is meant: {flags}")
    if consistency is not None:
        _require_same_candidate(consistency, new)
    places = [(gate, level) for gate in gates.gates for level in _levels(gate, base, new)]
    checks = sum(gate.worsening_max_fraction is not None for gate, _ in places)
    interleaved = is_interleaved(base, new)
    results = [
        _judge(gate, level, base, new, gates.confidence, checks, interleaved, consistency, seed)
        for gate, level in places
    ]
    order = (Decision.GO, Decision.INCONCLUSIVE, Decision.NO_GO)
    verdict = max((one.decision for one in results), key=order.index, default=Decision.INCONCLUSIVE)
    return CompareResult(
        verdict=verdict,
        base=base.name,
        new=new.name,
        gates_name=gates_name,
        confidence=gates.confidence,
        gates=tuple(results),
        differences=found,
        is_interleaved=interleaved,
        consistency=None if consistency is None else str(consistency.verdict),
        notes=tuple(_notes(base, new, interleaved, consistency)),
        finished_unix_s=finished_unix_s,
    )


def _require_same_candidate(consistency: VerifyResult, new: BenchRun) -> None:
    """A verdict on one deployment must not let another pass. Raises UsageError where both sides' facts are known."""
    verified = consistency.candidate.facts
    differing = [name for name in differences(verified, new.facts) if name in _IDENTITY]
    if differing:
        name = differing[0]
        raise UsageError(
            f"the verify result is of another deployment than `{new.name}`: {name} "
            f"`{getattr(verified, name)}` against `{getattr(new.facts, name)}`",
            hint=f"verify the deployment that was measured, and name that folder: --verify DIR (this one judged "
            f"{consistency.candidate.name})",
        )


def _levels(gate: Gate, base: BenchRun, new: BenchRun) -> list[float | None]:
    if gate.consistency is not None:
        return [None]
    if gate.at is not None:
        return list(gate.at)
    if gate.max is not None or gate.min is not None or gate.base_at is not None:
        return list(new.levels)
    return [level for level in base.levels if level in new.levels]


def _judge(
    gate: Gate,
    level: float | None,
    base: BenchRun,
    new: BenchRun,
    confidence: float,
    checks: int,
    interleaved: bool,
    consistency: VerifyResult | None,
    seed: int,
) -> GateResult:
    if gate.consistency is not None:
        return _consistency(gate, consistency)
    assert gate.metric is not None
    assert level is not None
    ours = _known(base, gate.base_at if gate.base_at is not None else level, gate.metric)
    theirs = _known(new, level, gate.metric)
    if gate.max is not None or gate.min is not None:
        return _limit(gate, level, theirs)
    is_same_run = base.results == new.results
    effect = effect_of(
        ours,
        theirs,
        is_higher_better=gate.metric in HIGHER_IS_BETTER,
        is_paired=interleaved or is_same_run,
        confidence=confidence,
        checks=checks,
        times_s=_times(base, new, len(ours), len(theirs)) if interleaved else None,
        seed=seed,
    )
    return _relative(gate, level, ours, theirs, effect)


def _times(base: BenchRun, new: BenchRun, ours: int, theirs: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """When each repeat was taken; None where some repeats have no value, for then the places do not match."""
    if len(base.started_unix_s) != ours or len(new.started_unix_s) != theirs:
        return None
    return base.started_unix_s, new.started_unix_s


def _known(run: BenchRun, level: float, metric: str) -> tuple[float, ...]:
    return tuple(value for value in run.samples.get((level, metric), ()) if value is not None)


def _consistency(gate: Gate, result: VerifyResult | None) -> GateResult:
    passing = gate.consistency or []
    if result is None:
        decision, reason = Decision.INCONCLUSIVE, "no result of verify was given: --verify DIR"
    elif result.verdict in passing:
        decision, reason = Decision.GO, f"verify says {result.verdict}"
    else:
        is_open = result.verdict == "INCONCLUSIVE"
        decision = Decision.INCONCLUSIVE if is_open else Decision.NO_GO
        reason = f"verify says {result.verdict}; {' or '.join(passing)} passes"
        if result.causes:
            reason += f"; cause: {result.causes[0].message}"
    return _result(gate, None, decision, reason, name=f"consistency in {', '.join(passing)}")


def _limit(gate: Gate, level: float, values: Sequence[float]) -> GateResult:
    bound, word = (gate.max, "above") if gate.max is not None else (gate.min, "below")
    assert bound is not None
    name = f"{gate.metric} {'<=' if gate.max is not None else '>='} {bound:g}"
    if not values:
        return _result(gate, level, Decision.INCONCLUSIVE, "NEW has no value for it", name=name, bound=bound)
    mean = math.fsum(values) / len(values)
    is_over = mean > bound if gate.max is not None else mean < bound
    return _result(
        gate,
        level,
        Decision.NO_GO if is_over else Decision.GO,
        f"{mean:.4g} is {word if is_over else 'not ' + word} {bound:g}",
        name=name,
        new=mean,
        measured=mean,
        bound=bound,
        repeats=len(values),
    )


def _relative(
    gate: Gate, level: float, ours: Sequence[float], theirs: Sequence[float], effect: Effect | None
) -> GateResult:
    is_regression = gate.worsening_max_fraction is not None
    bound = gate.worsening_max_fraction if is_regression else gate.improvement_min_fraction
    assert bound is not None
    name = f"{gate.metric} {f'at most {bound:.0%} worse' if is_regression else f'at least {bound:.0%} better'}"
    if gate.base_at is not None:
        name += f" than BASE at {gate.base_at:g}"
    base_mean = math.fsum(ours) / len(ours) if ours else None
    new_mean = math.fsum(theirs) / len(theirs) if theirs else None
    repeats = min(len(ours), len(theirs))
    if effect is None:
        reason = f"{repeats} usable repeats, {MIN_REPEATS} are needed: bench --repeat 5"
        if repeats == 0:
            reason = "a run has no value for it at this level (a p90 needs 29 requests a repeat, a p50 5)"
        return _result(
            gate,
            level,
            Decision.INCONCLUSIVE,
            reason,
            name=name,
            base=base_mean,
            new=new_mean,
            bound=bound,
            repeats=repeats,
        )
    assert base_mean is not None
    assert new_mean is not None
    worse = (base_mean - new_mean) if gate.metric in HIGHER_IS_BETTER else (new_mean - base_mean)
    decide = _regression if is_regression else _improvement
    decision, reason = decide(effect, worse, bound, gate.floor)
    if is_regression:
        measured, interval = effect.worse_fraction, effect.interval
    else:
        measured, interval = _better(effect)
    return _result(
        gate,
        level,
        decision,
        reason,
        name=name,
        base=base_mean,
        new=new_mean,
        measured=measured,
        bound=bound,
        interval=interval,
        detectable=effect.detectable_fraction,
        repeats=repeats,
    )


def _regression(effect: Effect, worse: float, bound: float, floor: float) -> tuple[Decision, str]:
    seen = f"{_signed(effect.worse_fraction)} [{_signed(effect.interval.low)} to {_signed(effect.interval.high)}]"
    if abs(worse) < floor:
        return Decision.GO, f"{seen}: a difference below the floor of {floor:g}"
    if effect.worse_fraction > bound and effect.strict_low > 0 and worse >= floor:
        return Decision.NO_GO, f"{seen}: over {bound:.0%}, and surely worse"
    if effect.interval.high <= bound:
        return Decision.GO, f"{seen}: surely within {bound:.0%}"
    return (
        Decision.INCONCLUSIVE,
        f"{seen}: these repeats would show {effect.detectable_fraction:.1%}; more repeats or a quieter machine",
    )


def _improvement(effect: Effect, worse: float, bound: float, floor: float) -> tuple[Decision, str]:
    better, interval = _better(effect)
    seen = f"{better:+.1%} [{interval.low:+.1%} to {interval.high:+.1%}]"
    if interval.low >= bound:
        return Decision.GO, f"{seen}: surely at least {bound:.0%} better"
    if interval.high < bound:
        return Decision.NO_GO, f"{seen}: surely not {bound:.0%} better"
    return Decision.INCONCLUSIVE, f"{seen}: {bound:.0%} lies within the interval; more repeats"


def _better(effect: Effect) -> tuple[float, Interval]:
    """The same ratio from the other end: base/new - 1 worse becomes new/base - 1 better."""

    def turned(worse: float) -> float:
        return 1 / (1 + worse) - 1

    return turned(effect.worse_fraction), Interval(low=turned(effect.interval.high), high=turned(effect.interval.low))


def _signed(fraction: float) -> str:
    return f"{abs(fraction):.1%} {'worse' if fraction > 0 else 'better'}"


def _result(
    gate: Gate,
    level: float | None,
    decision: Decision,
    reason: str,
    *,
    name: str,
    base: float | None = None,
    new: float | None = None,
    measured: float | None = None,
    bound: float | None = None,
    interval: Interval | None = None,
    detectable: float | None = None,
    repeats: int = 0,
) -> GateResult:
    return GateResult(
        gate=name,
        metric=gate.metric or "consistency",
        level=level,
        decision=decision,
        reason=reason,
        base=base,
        new=new,
        measured=measured,
        bound=bound,
        interval=interval,
        detectable=detectable,
        repeats=repeats,
    )


def _notes(base: BenchRun, new: BenchRun, interleaved: bool, consistency: VerifyResult | None) -> list[str]:
    notes = []
    unknown = [run.name for run in (base, new) if run.facts.model_sha256 is None]
    if unknown:
        notes.append(
            f"model, flags and hardware of {' and '.join(dict.fromkeys(unknown))} are not known (a bare URL was "
            "measured): only loads, lengths and clients were held against each other"
        )
    if not interleaved and base.results != new.results:
        notes.append(
            "the runs were not interleaved: what the machine did between them (clocks, temperature, other tenants) "
            "counts as a difference of the deployments"
        )
    if consistency is not None and None in (consistency.candidate.facts.model_sha256, new.facts.model_sha256):
        notes.append(
            f"that the verify result ({consistency.candidate.name}) is of the deployment measured as {new.name} is "
            "your word: one of the two was a bare URL"
        )
    return notes
