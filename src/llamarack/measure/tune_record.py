"""The `tune` record: what other programs read. Written anew after every trial, so that a kill keeps what was there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from llamarack.measure.result import Environment
from llamarack.measure.tune import Claim, LevelGain, Outcome, Trial

SCHEMA_VERSION = 1
RESULT_NAME = "tune.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUsed:
    """`own`: the settings that the engine takes when nobody says anything."""

    path: str
    engine: str
    engine_version: str | None
    precision: str
    own: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of every trial. `requests`: of each level. `input_tokens` None: prompts from a file."""

    concurrency: tuple[int, ...]
    rates_per_s: tuple[float, ...]
    requests: tuple[int, ...]
    prompts: str
    input_tokens: int | None
    output_tokens: int
    slo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """`start`: the file as it is. `best` None: nothing could be measured, or the run was ended before its end.
    `is_better`: shown to beat the file; `written`: the new file then. `notes`: what a reader must know to read the
    figures right.
    """

    schema_version: int = SCHEMA_VERSION
    file: str
    model: str
    environment: Environment
    weights: tuple[WeightsUsed, ...]
    load: Load
    start: Trial
    outcomes: tuple[Outcome, ...]
    best: Trial | None = None
    claims: tuple[Claim, ...] = ()
    by_level: tuple[LevelGain, ...] = ()
    is_better: bool = False
    is_interrupted: bool = False
    is_out_of_time: bool = False
    written: str | None = None
    notes: tuple[str, ...] = ()


def to_json(result: TuneResult) -> bytes:
    return orjson.dumps(asdict(result), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def json_schema() -> dict[str, Any]:
    """Of the `tune` record: `llamarack schema --record tune`."""
    return TypeAdapter(TuneResult).json_schema(mode="serialization")


def write_tune(result: TuneResult, folder: Path) -> Path:
    """Whole or not at all: a reader never sees half of it."""
    path, partial = folder / RESULT_NAME, folder / f"{RESULT_NAME}.partial"
    partial.write_bytes(to_json(result))
    partial.replace(path)
    return path
