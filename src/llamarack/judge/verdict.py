"""From two collections to SAME, ROUNDING, DRIFT or BROKEN, with what was seen. Pure.

    SAME          equal answers, and log-probabilities within the reference's own noise
    ROUNDING      every difference is one that arithmetic in another order makes: no token parts where the reference
                  cared, and the distributions are as close as rounding leaves them
    DRIFT         a difference in what the model says, of the size that quantisation makes
    BROKEN        the candidate reads other tokens, answers garbage where the reference does not, or its distributions
                  are further off than any usable quantisation
    INCONCLUSIVE  the sides could not be compared closely enough (answers alone, and they differ)

Bounds, in nats, and where they come from: docs/verify-and-compare.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from llamarack.judge.collection import Collection, Side
from llamarack.judge.diagnosis import Cause, Shape, reading_causes, shape_of, weights_cause
from llamarack.judge.divergence import Divergence, FreeRunStats, Kind, first_divergence, free_run_stats
from llamarack.judge.facts import differences, factors_of
from llamarack.judge.forced import ForcedStats, forced_errors, forced_stats
from llamarack.judge.observation import Observation, Spoken
from llamarack.judge.reading import Fault, ReadingFault, reading_faults
from llamarack.measure.distribution import Interval

SCHEMA_VERSION = 1


class Verdict(StrEnum):
    SAME = "SAME"
    ROUNDING = "ROUNDING"
    DRIFT = "DRIFT"
    BROKEN = "BROKEN"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        return {Verdict.SAME: 0, Verdict.ROUNDING: 0, Verdict.INCONCLUSIVE: 7}.get(self, 6)


_ORDER = (Verdict.SAME, Verdict.ROUNDING, Verdict.INCONCLUSIVE, Verdict.DRIFT, Verdict.BROKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`tie_nats`: a preference this small is turned by rounding alone; the measured noise may raise it. A bfloat16
    step near a logit of 18 is 0.125, near-ties were seen to flip at 0.018. `rounding_*`: what arithmetic in another
    order leaves. `broken_*`: beyond the coarsest quantisations in use (2 to 3 bits: KL 0.1 to 0.3, same best token
    85 %). `noise_factor`: how many times the reference's own noise counts as rounding.
    """

    tie_nats: float = 0.02
    rounding_kl: float = 1e-3
    rounding_logprob_p99: float = 0.1
    broken_kl: float = 0.5
    broken_agreement: float = 0.6
    noise_factor: float = 3.0
    faulty_questions: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`measured`, `bound`, `interval`: where it is a number. `verdict`: what this finding alone would mean."""

    code: str
    verdict: Verdict
    message: str
    measured: float | None = None
    bound: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One source of difference. `factor`: `again`, `under load`, `after a restart` (the reference against itself),
    `batching` (the candidate under load against itself alone), else what the two sides differ in.
    """

    factor: str
    is_noise: bool
    stats: ForcedStats


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionResult:
    """Evidence for one question. `divergence`: None where only answers were compared."""

    question_id: str
    language: str | None
    is_equal: bool
    divergence: Divergence | None
    reference_text: str | None
    candidate_text: str | None
    faults: tuple[ReadingFault, ...]
    reference_faults: tuple[ReadingFault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """`noise_nats`: 99th percentile of the reference's log-probability error against itself; None: not measured."""

    schema_version: int = SCHEMA_VERSION
    verdict: Verdict
    reference: Side
    candidate: Side
    questions_name: str
    differing_facts: tuple[str, ...]
    factors: tuple[str, ...]
    bounds: Bounds
    noise_nats: float | None
    tie_nats: float
    free_run: FreeRunStats | None
    forced: ForcedStats | None
    drift: tuple[Drift, ...]
    shape: Shape | None
    causes: tuple[Cause, ...]
    findings: tuple[Finding, ...]
    questions: tuple[QuestionResult, ...]
    notes: tuple[str, ...]
    started_unix_s: float
    finished_unix_s: float


def judge(
    reference: Collection,
    candidate: Collection,
    *,
    bounds: Bounds,
    file_causes: Sequence[Cause] = (),
    finished_unix_s: float,
    seed: int = 0,
) -> VerifyResult:
    """`file_causes`: what a comparison of the model files found, where there was one."""
    differing = differences(reference.side.facts, candidate.side.facts)
    shared = {
        "reference": reference.side,
        "candidate": candidate.side,
        "questions_name": candidate.questions,
        "differing_facts": differing,
        "factors": factors_of(differing),
        "started_unix_s": min(reference.created_unix_s, candidate.created_unix_s),
        "finished_unix_s": finished_unix_s,
    }
    if reference.is_text_only or candidate.is_text_only:
        return _judge_texts(reference, candidate, bounds, shared)
    noise = _noise(reference, bounds.tie_nats, seed)
    measured = [drift.stats.logprob_error_p99 for drift in noise if drift.stats.logprob_error_p99 is not None]
    noise_nats = max(measured, default=None)
    tie_nats = max(bounds.tie_nats, 2 * (noise_nats or 0.0))  # both tokens' log-probabilities may be off
    noise = _noise(reference, tie_nats, seed)  # ties counted by the bound that it gave
    forced = _forced_by_id(reference, candidate)
    alone = _compare(reference.greedy, forced["alone"], tie_nats, seed)
    drift = [*noise, Drift(factor=_factor_name(differing), is_noise=False, stats=alone)]
    if "loaded" in forced:
        batching = _compare(forced["alone"], forced["loaded"], tie_nats, seed)
        drift.append(Drift(factor="batching", is_noise=False, stats=batching))
    questions = tuple(_questions(reference, candidate, forced["alone"], tie_nats))
    divergences = [one.divergence for one in questions if one.divergence is not None]
    free = free_run_stats(divergences)
    causes: list[Cause] = [*file_causes]
    shape = None
    findings = [*_number_findings(alone, free, noise, bounds, noise_nats)]
    if "loaded" in forced:
        under_load = _compare(reference.greedy, forced["loaded"], tie_nats, seed)
        loaded = _number_findings(under_load, None, noise, bounds, noise_nats)
        findings += [replace(f, code=f"loaded_{f.code}", message=f"under load: {f.message}") for f in loaded]
    findings += _reading_findings(questions, bounds)
    findings += [Finding(code=c.code, verdict=Verdict.BROKEN, message=c.message) for c in file_causes]
    if reference.probes is not None and candidate.probes is not None:
        shape = shape_of(reference.probes, candidate.probes)
        read_otherwise = reading_causes(reference.probes, candidate.probes)
        causes += read_otherwise
        findings += [Finding(code=c.code, verdict=Verdict.BROKEN, message=c.message) for c in read_otherwise]
        is_off = _worst(findings) is Verdict.BROKEN or (
            _worst(findings) is Verdict.DRIFT and "quantisation" not in factors_of(differing)
        )
        if is_off and (cause := weights_cause(shape)) is not None:
            causes.append(cause)
    verdict = _worst(findings)
    return VerifyResult(
        **shared,
        verdict=verdict,
        bounds=bounds,
        noise_nats=noise_nats,
        tie_nats=tie_nats,
        free_run=free,
        forced=alone,
        drift=tuple(drift),
        shape=shape,
        causes=tuple(causes),
        findings=tuple(findings),
        questions=questions,
        notes=tuple(_notes(reference, candidate, noise, free)),
    )


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


def _questions(
    reference: Collection, candidate: Collection, forced: Sequence[Observation], tie_nats: float
) -> list[QuestionResult]:
    shortest = min(reference.output_tokens, candidate.output_tokens)  # two saved runs may have been cut elsewhere
    own = {one.question_id: _cut(one, shortest) for one in candidate.greedy}
    under = {one.question_id: one for one in forced}
    results = []
    for ours in (_cut(one, shortest) for one in reference.greedy):
        theirs = own.get(ours.question_id)
        if theirs is None:
            continue
        # Another template makes another prompt: then the answers are judged as texts, and the place where they part
        # is where the candidate, made to read the reference's prompt, first wants another token.
        like = theirs if theirs.prompt_ids == ours.prompt_ids else _as_free(under[ours.question_id])
        found = first_divergence(ours, like, tie_nats=tie_nats)
        results.append(
            QuestionResult(
                question_id=ours.question_id,
                language=ours.language,
                is_equal=found.kind is Kind.NONE,
                divergence=found,
                reference_text=ours.text,
                candidate_text=theirs.text,
                faults=reading_faults(theirs.text or "", theirs.ids, ours.language),
                reference_faults=reading_faults(ours.text or "", ours.ids, ours.language),
            )
        )
    return results


def _cut(observed: Observation, tokens: int) -> Observation:
    """Without what is behind the shorter run's limit."""
    return replace(observed, positions=observed.positions[:tokens])


def _as_free(forced: Observation) -> Observation:
    positions = []
    for position in forced.positions:
        positions.append(replace(position, token_id=position.best_id))
        if position.best_id != position.token_id:
            break
    return replace(forced, positions=tuple(positions))


def _number_findings(
    stats: ForcedStats, free: FreeRunStats | None, noise: Sequence[Drift], bounds: Bounds, noise_nats: float | None
) -> list[Finding]:
    kl_bound = max(bounds.rounding_kl, bounds.noise_factor * max((n.stats.kl_mean or 0.0 for n in noise), default=0.0))
    error_bound = max(bounds.rounding_logprob_p99, bounds.noise_factor * (noise_nats or 0.0))
    kl, error, agreement = stats.kl_mean or 0.0, stats.logprob_error_p99 or 0.0, stats.agreement or 0.0
    is_exact = (stats.logprob_error_max or 0.0) <= (noise_nats or 0.0) and stats.untold == 0 and kl <= kl_bound
    same = Verdict.SAME if is_exact and agreement == 1 else Verdict.ROUNDING

    def of(is_within: bool, is_broken: bool) -> Verdict:
        return Verdict.BROKEN if is_broken else same if is_within else Verdict.DRIFT

    findings = [
        Finding(
            code="real_divergences",
            verdict=of(stats.real == 0, is_broken=False),
            message=f"{stats.real} of {stats.positions} tokens part where the reference cared, {stats.ties} at a tie",
            measured=float(stats.real),
            bound=0.0,
        ),
        Finding(
            code="agreement",
            verdict=of(stats.real == 0, agreement < bounds.broken_agreement),
            message=f"the same best token at {agreement:.1%} of {stats.positions} positions",
            measured=agreement,
            bound=bounds.broken_agreement,
            interval=stats.agreement_interval,
        ),
        Finding(
            code="kl",
            verdict=of(kl <= kl_bound, kl > bounds.broken_kl),
            message=f"distributions part by {kl:.3g} nats on average (at least; {stats.covered_mass_mean or 0:.0%} of "
            "the mass was told by both)",
            measured=kl,
            bound=kl_bound,
            interval=stats.kl_mean_interval,
        ),
        Finding(
            code="logprob_error_p99",
            verdict=of(error <= error_bound, is_broken=False),
            message=f"99 % of the log-probabilities are within {error:.3g} nats",
            measured=error,
            bound=error_bound,
        ),
    ]
    if free is not None and free.exact < free.questions:
        findings.append(
            Finding(
                code="exact_match",
                verdict=Verdict.DRIFT if free.real else Verdict.ROUNDING,
                message=f"{free.exact} of {free.questions} answers are equal; {free.ties} part at a tie, {free.real} "
                "where the reference cared",
                measured=free.exact_fraction,
                interval=free.exact_interval,
            )
        )
    return findings


def _reading_findings(questions: Sequence[QuestionResult], bounds: Bounds) -> list[Finding]:
    """Faults of the candidate where the reference has none of that kind."""
    findings = []
    for kind in Fault:
        at = [
            (one, fault)
            for one in questions
            for fault in one.faults
            if fault.kind is kind and kind not in {other.kind for other in one.reference_faults}
        ]
        if not at:
            continue
        is_gross = kind in {Fault.GARBAGE, Fault.RAW_PIECES, Fault.TEMPLATE_MARKS}
        many = len(at) >= min(bounds.faulty_questions, len(questions))
        first, fault = at[0]
        findings.append(
            Finding(
                code=f"reading_{kind}",
                verdict=Verdict.BROKEN if is_gross and many else Verdict.DRIFT,
                message=f"{len(at)} of {len(questions)} answers: {kind}, such as {first.question_id}: {fault.seen}; "
                "not so in the reference's",
                measured=float(len(at)),
                bound=0.0,
            )
        )
    return findings


def _worst(findings: Sequence[Finding]) -> Verdict:
    return max((one.verdict for one in findings), key=_ORDER.index, default=Verdict.INCONCLUSIVE)


def _factor_name(differing: Sequence[str]) -> str:
    """What the whole difference is put down to; several at once cannot be told apart by one comparison."""
    factors = [factor for factor in factors_of(differing) if factor != "settings"]
    return " + ".join(factors) if factors else "candidate against reference"


def _notes(reference: Collection, candidate: Collection, noise: Sequence[Drift], free: FreeRunStats) -> list[str]:
    notes = []
    if not noise:
        notes.append("the reference's own noise was not measured: only fixed bounds were applied")
    factors = [f for f in factors_of(differences(reference.side.facts, candidate.side.facts)) if f != "settings"]
    if len(factors) > 1:
        notes.append(
            f"the sides differ in {', '.join(factors)}: their shares can only be told apart by comparing step by step"
        )
    if free.length_ratio is not None and not 0.9 <= free.length_ratio <= 1.1:
        notes.append(f"the candidate's answers are {free.length_ratio:.0%} as long as the reference's")
    return notes


def _judge_texts(
    reference: Collection, candidate: Collection, bounds: Bounds, shared: Mapping[str, object]
) -> VerifyResult:
    """Answers alone: equal ones are SAME; others cannot be told from rounding."""
    ours = {one.question_id: one for one in _texts(reference)}
    results = [
        QuestionResult(
            question_id=theirs.question_id,
            language=theirs.language,
            is_equal=theirs.text == ours[theirs.question_id].text,
            divergence=None,
            reference_text=ours[theirs.question_id].text,
            candidate_text=theirs.text,
            faults=reading_faults(theirs.text, (), theirs.language),
            reference_faults=reading_faults(ours[theirs.question_id].text, (), theirs.language),
        )
        for theirs in _texts(candidate)
        if theirs.question_id in ours
    ]
    equal = sum(one.is_equal for one in results)
    findings = [
        Finding(
            code="exact_match",
            verdict=Verdict.SAME if equal == len(results) > 0 else Verdict.INCONCLUSIVE,
            message=f"{equal} of {len(results)} answers are equal",
            measured=equal / len(results) if results else None,
            bound=1.0,
        ),
        *_reading_findings(results, bounds),
    ]
    return VerifyResult(
        **shared,  # type: ignore[arg-type]
        verdict=_worst(findings),
        bounds=bounds,
        noise_nats=None,
        tie_nats=bounds.tie_nats,
        free_run=None,
        forced=None,
        drift=(),
        shape=None,
        causes=(),
        findings=tuple(findings),
        questions=tuple(results),
        notes=("answers alone were compared: without log-probabilities a difference cannot be told from rounding",),
    )


def _texts(collection: Collection) -> tuple[Spoken, ...]:
    if collection.is_text_only:
        return collection.spoken.get("alone", ())
    return tuple(
        Spoken(
            question_id=one.question_id,
            language=one.language,
            text=one.text or "",
            output_tokens=len(one.ids),
            finish_reason=one.finish_reason,
        )
        for one in collection.greedy
    )
