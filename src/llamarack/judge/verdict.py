"""From two collections to SAME, ROUNDING, DRIFT or BROKEN, with what was seen. Pure.

Bounds, in nats, and where they come from: docs/verify-and-compare.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamarack.judge.collect import Probes
from llamarack.judge.collection import Collection
from llamarack.judge.diagnosis import Cause, Shape, reading_causes, shape_of, weights_cause
from llamarack.judge.divergence import FreeRunStats, free_run_stats
from llamarack.judge.drift import Comparison, compared, drift_rows
from llamarack.judge.facts import differences, factors_of
from llamarack.judge.findings import cause_findings, findings_of, reading_findings, worst
from llamarack.judge.question_results import question_results, spoken_results
from llamarack.judge.verify_result import Bounds, Finding, Verdict, VerifyResult


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
    factors = factors_of(differing)
    shared: dict[str, Any] = {
        "reference": reference.side,
        "candidate": candidate.side,
        "questions_name": candidate.questions,
        "differing_facts": differing,
        "factors": factors,
        "bounds": bounds,
        "started_unix_s": min(reference.created_unix_s, candidate.created_unix_s),
        "finished_unix_s": finished_unix_s,
    }
    if reference.is_text_only or candidate.is_text_only:
        return _judge_texts(reference, candidate, bounds, shared)
    both = compared(reference, candidate, bounds=bounds, seed=seed)
    questions = question_results(reference, candidate, both.forced["alone"], both.tie_nats)
    free = free_run_stats([one.divergence for one in questions if one.divergence is not None])
    shape, read_otherwise = _probed(reference.probes, candidate.probes)
    shown = (*file_causes, *read_otherwise)
    findings = [*findings_of(both, free, bounds), *reading_findings(questions, bounds), *cause_findings(shown)]
    verdict = worst(findings)
    return VerifyResult(
        **shared,
        verdict=verdict,
        noise_nats=both.noise_nats,
        tie_nats=both.tie_nats,
        free_run=free,
        forced=both.alone,
        drift=drift_rows(both, differing),
        shape=shape,
        causes=(*shown, *_guessed(shape, verdict, factors)),
        findings=tuple(findings),
        questions=questions,
        notes=tuple(_notes(reference, candidate, both, free, bounds)),
    )


def _probed(ours: Probes | None, theirs: Probes | None) -> tuple[Shape | None, tuple[Cause, ...]]:
    """How next tokens part by kind of prefix, and what is read otherwise; nothing where a side was not asked."""
    if ours is None or theirs is None:
        return None, ()
    return shape_of(ours, theirs), reading_causes(ours, theirs)


def _guessed(shape: Shape | None, verdict: Verdict, factors: Sequence[str]) -> tuple[Cause, ...]:
    """A fault of the weights by its pattern; not asked for where the drift is what a quantisation makes."""
    is_off = verdict is Verdict.BROKEN or (verdict is Verdict.DRIFT and "quantisation" not in factors)
    cause = weights_cause(shape) if shape is not None and is_off else None
    return () if cause is None else (cause,)


def _notes(
    reference: Collection, candidate: Collection, both: Comparison, free: FreeRunStats, bounds: Bounds
) -> list[str]:
    notes = []
    own = None if both.batching is None else both.batching.logprob_error_p99
    if own is not None and both.allowed_nats > max(
        both.noise_nats or 0.0, bounds.rounding_logprob_p99 / bounds.noise_factor
    ):
        notes.append(
            f"beside other requests the candidate parts from itself by {own:.3g} nats, the reference by "
            f"{both.noise_nats or 0.0:.3g}: {both.allowed_nats:.3g} were taken for rounding"
        )
    if not both.noise:
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
    reference: Collection, candidate: Collection, bounds: Bounds, shared: Mapping[str, Any]
) -> VerifyResult:
    """Answers alone: equal ones are SAME; others cannot be told from rounding."""
    results = spoken_results(reference, candidate)
    equal = sum(one.is_equal for one in results)
    findings = [
        Finding(
            code="exact_match",
            verdict=Verdict.SAME if equal == len(results) > 0 else Verdict.INCONCLUSIVE,
            message=f"{equal} of {len(results)} answers are equal",
            measured=equal / len(results) if results else None,
            bound=1.0,
        ),
        *reading_findings(results, bounds),
    ]
    return VerifyResult(
        **shared,
        verdict=worst(findings),
        noise_nats=None,
        tie_nats=bounds.tie_nats,
        free_run=None,
        forced=None,
        drift=(),
        shape=None,
        causes=(),
        findings=tuple(findings),
        questions=results,
        notes=("answers alone were compared: without log-probabilities a difference cannot be told from rounding",),
    )
