"""A verify result as tables of text, for the terminal, Markdown and HTML alike. Unknown is `–`."""

from __future__ import annotations

from dataclasses import fields

from llamarack.judge.divergence import Kind
from llamarack.judge.facts import Facts
from llamarack.judge.forced import ForcedStats
from llamarack.judge.verify_result import Finding, QuestionResult, Verdict, VerifyResult
from llamarack.measure.distribution import Interval
from llamarack.report.bench_rows import UNKNOWN, Table

MEANING = {
    Verdict.SAME: "equal answers; log-probabilities within the reference's own noise",
    Verdict.ROUNDING: "the differences are those of arithmetic in another order; nothing parts where the model cared",
    Verdict.DRIFT: "the candidate says something else in places where the reference was sure",
    Verdict.BROKEN: "the candidate is not this model: a fault, not a rounding",
    Verdict.INCONCLUSIVE: "the sides could not be compared closely enough",
}


def headline(result: VerifyResult) -> str:
    return f"{result.verdict}: {MEANING[result.verdict]}"


def nats(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return "0" if value == 0 else f"{value:.2g}" if abs(value) < 0.01 else f"{value:.3f}"


def share(value: float | None, interval: Interval | None = None) -> str:
    if value is None:
        return UNKNOWN
    text = "100 %" if value == 1 else f"{100 * value:.1f} %"
    return text if interval is None else f"{text} [{100 * interval.low:.1f}–{100 * interval.high:.1f}]"


def causes(result: VerifyResult) -> Table | None:
    if not result.causes:
        return None
    rows = tuple((str(c.code), c.message, c.evidence, c.fix) for c in result.causes)
    return Table(title="Named causes", headers=("cause", "what", "evidence", "what to do"), rows=rows)


def drift(result: VerifyResult) -> Table:
    """Noise first, then what the candidate adds to it."""
    rows = tuple(
        (("the reference itself, " if one.is_noise else "") + one.factor, *_forced_cells(one.stats))
        for one in result.drift
    )
    return Table(
        title="Where the differences come from",
        headers=("source", "positions", "same best token", "at a tie", "real", "mean KL", "log-prob. p99", "largest"),
        rows=rows,
        note="Every model reads the same tokens, so each position is judged by itself. KL and log-probability errors "
        f"in nats; KL is a lower bound over the tokens told. A tie: the reference prefers its token by at most "
        f"{nats(result.tie_nats)} nats.",
    )


def _forced_cells(stats: ForcedStats) -> tuple[str, ...]:
    kl = nats(stats.kl_mean)
    if stats.kl_mean_interval is not None and stats.kl_mean:
        kl += f" [{nats(stats.kl_mean_interval.low)}–{nats(stats.kl_mean_interval.high)}]"
    return (
        f"{stats.positions:,}",
        share(stats.agreement, stats.agreement_interval if stats.agreement != 1 else None),
        str(stats.ties),
        str(stats.real),
        kl,
        nats(stats.logprob_error_p99),
        nats(stats.logprob_error_max),
    )


def findings(result: VerifyResult) -> Table:
    rows = tuple((one.message, nats(one.measured), nats(one.bound), str(one.verdict)) for one in result.findings)
    return Table(title="Findings", headers=("what was seen", "measured", "bound", "alone means"), rows=rows)


def free_run(result: VerifyResult) -> Table | None:
    stats = result.free_run
    if stats is None:
        return None
    median = UNKNOWN if stats.first_divergence_p50 is None else f"{stats.first_divergence_p50:g}"
    first = UNKNOWN if stats.first_divergence_min is None else str(stats.first_divergence_min)
    row = (
        f"{stats.exact} of {stats.questions}",
        share(stats.exact_fraction, stats.exact_interval),
        str(stats.ties),
        str(stats.real),
        f"{first} / {median}",
        share(stats.length_ratio),
    )
    return Table(
        title="Free-running answers",
        headers=("equal", "share", "part at a tie", "part for real", "first place, least / median", "length"),
        rows=(row,),
        note="Greedy answers as a user gets them. After its first different token an answer is another text and is "
        "not compared; its length is.",
    )


def questions(result: VerifyResult) -> Table:
    rows = tuple(_question_row(one) for one in result.questions)
    return Table(
        title="Question by question",
        headers=("question", "answer", "at token", "margin", "reference", "candidate", "reading"),
        rows=rows,
        note="Margin: how much the reference prefers its own token to the candidate's, in nats. Both texts are shown "
        "from the start.",
    )


def _question_row(one: QuestionResult) -> tuple[str, ...]:
    found = one.divergence
    kind = "equal" if one.is_equal else "differs" if found is None else f"parts: {found.kind}"
    margin = UNKNOWN
    if found is not None and found.margin_nats is not None and found.kind is not Kind.NONE:
        margin = (">" if found.is_margin_bound else "") + nats(found.margin_nats)
    reading = "; ".join(f"{fault.kind}: {fault.seen}" for fault in one.faults) or "ok"
    if one.faults and one.reference_faults:
        reading += " (the reference: " + "; ".join(str(fault.kind) for fault in one.reference_faults) + ")"
    return (
        one.question_id,
        kind,
        UNKNOWN if found is None or found.index is None else str(found.index),
        margin,
        _cut(one.reference_text),
        "the same" if one.is_equal else _cut(one.candidate_text),
        reading,
    )


def _cut(text: str | None) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def sides(result: VerifyResult) -> Table:
    """What is known of both; a row only where either knows."""
    ours, theirs = result.reference.facts, result.candidate.facts
    rows = [
        ("given as", result.reference.name, result.candidate.name),
        ("model", result.reference.model, result.candidate.model),
    ]
    rows += [
        (one.name.replace("_", " "), _fact(ours, one.name), _fact(theirs, one.name))
        for one in fields(Facts)
        if getattr(ours, one.name) is not None or getattr(theirs, one.name) is not None
    ]
    return Table(title="The two sides", headers=("what", "reference", "candidate"), rows=tuple(rows))


def _fact(facts: Facts, name: str) -> str:
    value = getattr(facts, name)
    if value is None:
        return UNKNOWN
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return str(value)[:16] if name.endswith("sha256") else str(value)


def deciding(result: VerifyResult) -> list[Finding]:
    """The findings that made the verdict. Where all is well the passes under load only say it again."""
    named = {cause.message for cause in result.causes}  # said already, with its evidence
    made = [one for one in result.findings if one.verdict is result.verdict and one.message not in named]
    if result.verdict in (Verdict.SAME, Verdict.ROUNDING):
        return [one for one in made if not one.code.startswith("loaded_")]
    return made


def fact_rows(facts: Facts) -> tuple[tuple[str, str], ...]:
    """Those that are known."""
    known = [one.name for one in fields(Facts) if getattr(facts, one.name) is not None]
    return tuple((name.replace("_", " "), _fact(facts, name)) for name in known)
