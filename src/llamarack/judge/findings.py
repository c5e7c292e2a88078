"""From numbers and answers to findings, each with the verdict that it alone would mean. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamarack.judge.diagnosis import Cause
from llamarack.judge.divergence import FreeRunStats
from llamarack.judge.drift import Comparison
from llamarack.judge.forced import ForcedStats
from llamarack.judge.reading import Fault
from llamarack.judge.verify_result import Bounds, Finding, QuestionResult, Verdict

_ORDER = (Verdict.SAME, Verdict.ROUNDING, Verdict.INCONCLUSIVE, Verdict.DRIFT, Verdict.BROKEN)


def worst(findings: Sequence[Finding]) -> Verdict:
    return max((one.verdict for one in findings), key=_ORDER.index, default=Verdict.INCONCLUSIVE)


def findings_of(both: Comparison, free: FreeRunStats, bounds: Bounds) -> list[Finding]:
    """Of the candidate alone, then of the candidate under load."""
    findings = number_findings(both.alone, free, both, bounds)
    if both.loaded is not None:
        loaded = number_findings(both.loaded, None, both, bounds)
        findings += [replace(f, code=f"loaded_{f.code}", message=f"under load: {f.message}") for f in loaded]
    return findings


def cause_findings(causes: Sequence[Cause]) -> list[Finding]:
    """A fault that was found in a file, or in how texts are read, breaks whatever the numbers say."""
    return [Finding(code=one.code, verdict=Verdict.BROKEN, message=one.message) for one in causes]


def number_findings(stats: ForcedStats, free: FreeRunStats | None, both: Comparison, bounds: Bounds) -> list[Finding]:
    """How far the distributions and the best tokens part. `free`: None where it is said elsewhere. Only the
    reference's own noise makes a difference none.
    """
    noise_nats = both.noise_nats
    kl_bound = max(bounds.rounding_kl, bounds.noise_factor * both.allowed_kl)
    error_bound = max(bounds.rounding_logprob_p99, bounds.noise_factor * both.allowed_nats)
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


def reading_findings(questions: Sequence[QuestionResult], bounds: Bounds) -> list[Finding]:
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
