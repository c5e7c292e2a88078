"""The steps of an acceptance in words: from a step's own result to the row of the report. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llamarack.hardware.finding import Finding, Severity
from llamarack.judge.acceptance import (
    BENCH_FOLDER,
    COMPARE_FOLDER,
    VERIFY_FOLDER,
    Outcome,
    Step,
    bench_outcome,
    check_outcome,
    compare_outcome,
    verify_outcome,
)
from llamarack.judge.compare import CompareResult, Decision
from llamarack.judge.verify_result import VerifyResult
from llamarack.measure.result import BenchResult
from llamarack.report.bench_rows import UNKNOWN, overview
from llamarack.report.compare_rows import reasons
from llamarack.report.verify_rows import deciding, headline
from llamarack.units import format_bytes, format_duration

_PAGE = "report.html"
_AGAIN = "an invalid run says nothing about the deployment: accept it again while the machine does nothing else"


def check_step(found: Sequence[Finding]) -> Step:
    """Errors first."""
    errors = [one for one in found if one.severity is Severity.ERROR]
    warnings = [one for one in found if one.severity is Severity.WARNING]
    return Step(
        name="check",
        outcome=check_outcome(found),
        summary=f"{_count(errors, 'error')}, {_count(warnings, 'warning')}",
        details=tuple(
            f"{one.severity}: {one.code}, {one.subject}: {one.seen}; fix: {one.fix}" for one in [*errors, *warnings]
        ),
    )


def serve_step(status: Mapping[str, Any], seconds: float) -> Step:
    """`status`: the rack's record, once all of its replicas are ready."""
    replicas = [replica for model in status["models"] for replica in model["replicas"]]
    return Step(
        name="serve",
        outcome=Outcome.PASSED,
        summary=f"{_count(replicas, 'replica')} ready after {format_duration(seconds)}",
        details=tuple(
            f"{one['id']}: {one['state']}, {one['slots_total']} slots of {one['context_tokens']:,} tokens, planned "
            f"{format_bytes(one['predicted']['total_bytes'])}, resident {format_bytes(one['actual']['resident_bytes'])}"
            for one in replicas
        ),
    )


def verify_step(result: VerifyResult, reference: str | None) -> Step:
    """`reference`: None where the deployment was held against itself."""
    whom = f"against {reference}" if reference else "against itself, alone and under load"
    causes = [f"{one.message}: {one.evidence}" for one in result.causes]
    return Step(
        name="verify",
        outcome=verify_outcome(result.verdict),
        summary=f"{headline(result)} ({whom})",
        details=(*causes, *(one.message for one in deciding(result))),
        report=f"{VERIFY_FOLDER}/{_PAGE}",
    )


def invalid_reason(result: BenchResult) -> str:
    """The first of a run that is not valid."""
    reasons = [reason for point in result.points for reason in point.invalid_reasons]
    return (reasons or ["it was interrupted"])[0]


def bench_step(result: BenchResult, before: BenchResult | None = None) -> Step:
    """`before`: an invalid run, after which this one was made."""
    table = overview(result)
    cells = [[f"{h} {c}" for h, c in zip(table.headers, row, strict=True) if c != UNKNOWN] for row in table.rows]
    first = [] if before is None else [f"measured twice: the first run was invalid: {invalid_reason(before)}"]
    return Step(
        name="bench",
        outcome=bench_outcome(result.valid),
        summary=_speed(result) if result.valid else f"the run is invalid: {invalid_reason(result)}",
        details=(*first, *(", ".join(row) for row in cells), *([] if result.valid else [_AGAIN])),
        report=f"{BENCH_FOLDER}/{_PAGE}",
    )


def no_base_step(folder: str) -> Step:
    """`folder`: of this acceptance, which the next one can be held against."""
    summary = f"no base; the next run can be held against this one: --base {folder}"
    return Step(name="compare", outcome=Outcome.SKIPPED, summary=summary)


def compare_step(result: CompareResult, base: str) -> Step:
    return Step(
        name="compare",
        outcome=compare_outcome(result.verdict),
        summary=f"{_gates_text(result)} against {base} by the gates `{result.gates_name}`",
        details=tuple(reasons(result)),
        report=f"{COMPARE_FOLDER}/{_PAGE}",
    )


def _gates_text(result: CompareResult) -> str:
    """`GO`, or how many gates are not."""
    if result.verdict is Decision.GO:
        return str(Decision.GO)
    counts = Counter(gate.decision for gate in result.gates)
    others = [f"{counts[one]} {one}" for one in (Decision.NO_GO, Decision.INCONCLUSIVE) if counts[one]]
    return f"{counts[Decision.GO]} of {len(result.gates)} gates GO, {', '.join(others)}"


def _speed(result: BenchResult) -> str:
    parts = []
    for point in result.points:
        first, rate = point.metrics.ttft_s.p50, point.output_tokens_per_s
        said = f"{rate:.1f} tokens/s" if rate is not None else "rate unknown"
        parts.append(f"{point.concurrency} at once: first token {format_duration(first)}, {said}")
    return "; ".join(parts)


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}" if len(things) == 1 else f"{len(things)} {name}s"
