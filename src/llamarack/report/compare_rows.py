"""A compare result as tables of text. Unknown is `–`."""

from __future__ import annotations

from llamarack.judge.compare import CompareResult, Decision, GateResult
from llamarack.judge.gates import HIGHER_IS_BETTER
from llamarack.report.bench_rows import UNKNOWN, Table
from llamarack.units import format_duration, format_rate

MEANING = {
    Decision.GO: "every gate is passed, each with its whole interval",
    Decision.NO_GO: "at least one gate is surely not passed",
    Decision.INCONCLUSIVE: "no gate is surely failed, but not every one is surely passed",
}


def headline(result: CompareResult) -> str:
    return f"{result.verdict}: {MEANING[result.verdict]}"


def title(result: CompareResult) -> str:
    return f"{_side(result.new)} against {_side(result.base)}"


def _side(names: str) -> str:
    """Of a run given as several folders, the first and how many more."""
    first, *more = [name for name in names.split(",") if name]
    return f"{first} and {len(more)} more" if more else first


def gates(result: CompareResult) -> Table:
    rows = tuple(
        (
            one.gate,
            UNKNOWN if one.level is None else f"{one.level:g}",
            value(one.metric, one.base),
            value(one.metric, one.new),
            change(one),
            UNKNOWN if one.detectable is None else f"{one.detectable:.1%}",
            UNKNOWN if not one.repeats else str(one.repeats),
            str(one.decision),
        )
        for one in result.gates
    )
    return Table(
        title="Gates",
        headers=("gate", "at", "BASE", "NEW", f"change [{result.confidence:.0%}]", "detectable", "repeats", "decision"),
        rows=rows,
        note="At: concurrency or requests/s. Change: from BASE to NEW, mean over repeats, with its interval over "
        "repeats. Detectable: the smallest worsening that so many repeats show in four of five cases.",
    )


def change(one: GateResult) -> str:
    """Signed as a reader of the two values expects: more is `+`."""
    if one.interval is None or one.measured is None:
        return UNKNOWN if one.measured is None or one.base is None else f"{one.measured:.4g}"
    is_worsening = "worse" in one.gate
    if is_worsening == (one.metric in HIGHER_IS_BETTER):
        centre, low, high = (1 / (1 + x) - 1 for x in (one.measured, one.interval.high, one.interval.low))
    else:
        centre, low, high = one.measured, one.interval.low, one.interval.high
    return f"{centre:+.1%} [{low:+.1%} to {high:+.1%}]"


def value(metric: str, number: float | None) -> str:
    if number is None:
        return UNKNOWN
    if metric.endswith("_fraction"):
        return f"{number:.1%}"
    if metric.endswith("per_s"):
        return format_rate(number, metric.removesuffix("_per_s").split("_")[-1] + "/s")
    return format_duration(number) if metric.endswith("_s") else f"{number:.4g}"


def reasons(result: CompareResult) -> list[str]:
    """Of the gates that made the verdict; all of them where it is a GO."""
    deciding = [one for one in result.gates if one.decision is result.verdict and result.verdict is not Decision.GO]
    return [f"{one.gate}{place(one)}: {one.reason}" for one in deciding]


def place(one: GateResult) -> str:
    return "" if one.level is None else f", at {one.level:g}"


def all_reasons(result: CompareResult) -> Table:
    rows = tuple((f"{one.gate}{place(one)}", str(one.decision), one.reason) for one in result.gates)
    return Table(title="Why", headers=("gate", "decision", "reason"), rows=rows)


def differences(result: CompareResult) -> Table | None:
    if not result.differences:
        return None
    rows = tuple((one.name, one.base, one.new) for one in result.differences)
    return Table(title="What is meant to differ", headers=("what", "BASE", "NEW"), rows=rows)
