"""The record of an acceptance run and its one verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from llamarack.judge.compare import Decision
from llamarack.judge.facts import Facts

SCHEMA_VERSION = 1
RESULT_NAME = "acceptance.json"
STEPS = ("check", "serve", "verify", "bench", "compare")


class Outcome(StrEnum):
    """`SKIPPED`: there was nothing to do it with, or an earlier step failed; the summary says which."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    INCONCLUSIVE = "INCONCLUSIVE"
    SKIPPED = "SKIPPED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`details`: what a reader of the report wants beside the summary. `report`: relative to the report's folder."""

    name: str
    outcome: Outcome
    seconds: float
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
