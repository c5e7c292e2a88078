"""The record of an acceptance run, what each step's result means for it, and its one verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from llamarack.errors import InvalidRun, LlamarackError
from llamarack.hardware.finding import Finding, Severity
from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME
from llamarack.judge.compare import Decision
from llamarack.judge.facts import Facts
from llamarack.judge.verify_result import Verdict
from llamarack.measure.result import RESULT_NAME as BENCH_NAME

SCHEMA_VERSION = 1
RESULT_NAME = "acceptance.json"
STEPS = ("check", "serve", "verify", "bench", "compare")
VERIFY_FOLDER, BENCH_FOLDER, COMPARE_FOLDER = "verify", "bench", "compare"  # within the acceptance's own
INVALID_BENCH_FOLDER = "bench-invalid"  # a first try
_FOUNDATIONS = frozenset({"check", "serve"})  # what the later steps stand on


class Outcome(StrEnum):
    """`SKIPPED`: there was nothing to do it with, or an earlier step failed; the summary says which."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    INCONCLUSIVE = "INCONCLUSIVE"
    SKIPPED = "SKIPPED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`details`: what a reader of the report wants beside the summary. `report`: relative to the report's folder.
    `seconds`: filled in by whoever did it.
    """

    name: str
    outcome: Outcome
    seconds: float = 0.0
    summary: str
    details: tuple[str, ...] = ()
    report: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceResult:
    """`changed_since`: kinds of earlier proofs that were made with other settings."""

    schema_version: int = SCHEMA_VERSION
    verdict: Decision
    file: str
    model: str
    facts: Facts
    steps: tuple[Step, ...]
    changed_since: tuple[str, ...]
    started_unix_s: float
    finished_unix_s: float


def check_outcome(found: Sequence[Finding]) -> Outcome:
    """A warning is for the reader; an error is a machine on which nothing is proved."""
    return Outcome.FAILED if any(one.severity is Severity.ERROR for one in found) else Outcome.PASSED


def verify_outcome(verdict: Verdict) -> Outcome:
    return {0: Outcome.PASSED, 7: Outcome.INCONCLUSIVE}.get(verdict.exit_code, Outcome.FAILED)


def bench_outcome(is_valid: bool) -> Outcome:
    """An invalid run says nothing about the deployment, good or bad."""
    return Outcome.PASSED if is_valid else Outcome.INCONCLUSIVE


def compare_outcome(decision: Decision) -> Outcome:
    outcomes = {Decision.GO: Outcome.PASSED, Decision.NO_GO: Outcome.FAILED}
    return outcomes.get(decision, Outcome.INCONCLUSIVE)


def step_of_error(name: str, error: LlamarackError, *, prefix: str = "") -> Step:
    """A step that ended in an error: its first line, the whole where there is more, and the hint for the report. An
    invalid run is no fault of the deployment: it proves nothing either way.
    """
    first = error.message.splitlines()[0] if error.message else "failed"
    more = [error.message] if error.message.strip() not in ("", first) else []
    details = (*more, *([f"hint: {error.hint}"] if error.hint else []))
    outcome = Outcome.INCONCLUSIVE if isinstance(error, InvalidRun) else Outcome.FAILED
    return Step(name=name, outcome=outcome, summary=f"{prefix}{first}", details=details)


def ends_the_run(step: Step) -> bool:
    return step.outcome is Outcome.FAILED and step.name in _FOUNDATIONS


def skipped_rest(steps: Sequence[Step]) -> tuple[Step, ...]:
    """For every step that was not come to, after the last one failed."""
    done = {step.name for step in steps}
    failed = steps[-1].name if steps else "an earlier step"
    return tuple(
        Step(name=name, outcome=Outcome.SKIPPED, summary=f"{failed} failed") for name in STEPS if name not in done
    )


def saved_reference(base: Path | None) -> Path | None:
    """The run of `verify` that BASE's own acceptance left; None where it left none."""
    if base is None:
        return None
    folder = base / VERIFY_FOLDER
    return folder if any((folder / name).exists() for name in (REFERENCE_NAME, CANDIDATE_NAME)) else None


def saved_bench(base: Path) -> Path:
    """BASE is an acceptance's folder, or that of a bench."""
    folder = base / BENCH_FOLDER
    return folder if (folder / BENCH_NAME).exists() else base


def verdict_of(steps: Sequence[Step]) -> Decision:
    """NO-GO for a failed step, INCONCLUSIVE for an open one or one that was skipped for no fault of the deployment's
    file but a missing base of comparison is no obstacle: the first acceptance has none.
    """
    outcomes = {step.name: step.outcome for step in steps}
    if Outcome.FAILED in outcomes.values():
        return Decision.NO_GO
    required = {name: outcome for name, outcome in outcomes.items() if name != "compare"}
    is_open = Outcome.INCONCLUSIVE in outcomes.values() or Outcome.SKIPPED in required.values()
    return Decision.INCONCLUSIVE if is_open or len(required) < len(STEPS) - 1 else Decision.GO


def to_json(result: AcceptanceResult) -> bytes:
    return orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def json_schema() -> dict[str, Any]:
    return TypeAdapter(AcceptanceResult).json_schema(mode="serialization")


def write_result(result: AcceptanceResult, folder: Path) -> None:
    path = folder / RESULT_NAME
    partial = path.with_name(f"{RESULT_NAME}.partial")
    partial.write_bytes(to_json(result))
    partial.replace(path)
