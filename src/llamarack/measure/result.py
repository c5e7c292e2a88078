"""The `bench` result record: what other programs read. Written as `result.json` beside the raw `requests.jsonl`."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from llamarack.errors import UsageError
from llamarack.measure.against_plan import PlannedRun
from llamarack.measure.point import PointResult
from llamarack.measure.rack import MemorySeries
from llamarack.measure.record import RequestRecord, from_json_line
from llamarack.version import __version__

SCHEMA_VERSION = 1
RECORDS_NAME = "requests.jsonl"
RESULT_NAME = "result.json"
REPORT_NAME = "report.html"  # of bench, tune, soak, verify, compare and acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """`template_tokens`: what the server adds to every prompt; None where prompts are not of exact length."""

    url: str
    model: str
    endpoint: str
    extras: tuple[str, ...]
    round_trip_s: float
    template_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Of the client."""

    llamarack_version: str
    python_version: str
    kernel: str
    machine: str
    processors: int
    processors_usable: int
    started_unix_s: float
    started_monotonic_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`token_counter`: what made the lengths exact, or None. `seed`: of prompts and arrivals."""

    load: str
    prompts: str
    token_counter: str | None
    input_tokens: int | None
    output_tokens: int | None
    is_fixed_length: bool
    is_cache_wanted: bool
    repeats: int
    workers: int
    slo: str | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """`valid`: every point is. `is_interrupted`: points hold what was measured until then. `memory` and `plan`: of a
    rack on this machine, measured by its file.
    """

    schema_version: int = SCHEMA_VERSION
    target: TargetInfo
    environment: Environment
    workload: Workload
    valid: bool
    is_interrupted: bool
    notes: tuple[str, ...]
    points: tuple[PointResult, ...]
    memory: tuple[MemorySeries, ...] = ()
    plan: PlannedRun | None = None


def environment(*, started_unix_s: float, started_monotonic_ns: int) -> Environment:
    return Environment(
        llamarack_version=__version__,
        python_version=platform.python_version(),
        kernel=platform.release(),
        machine=platform.machine(),
        processors=os.cpu_count() or 1,
        processors_usable=len(os.sched_getaffinity(0)),
        started_unix_s=started_unix_s,
        started_monotonic_ns=started_monotonic_ns,
    )


def to_json(result: BenchResult) -> bytes:
    return orjson.dumps(asdict(result), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def json_schema() -> dict[str, Any]:
    """Of the `bench` record: `llamarack schema --record bench`."""
    return TypeAdapter(BenchResult).json_schema(mode="serialization")


def write_result(result: BenchResult, folder: Path) -> Path:
    """Whole or not at all: a reader never sees half of it."""
    path, partial = folder / RESULT_NAME, folder / f"{RESULT_NAME}.partial"
    partial.write_bytes(to_json(result))
    partial.replace(path)
    return path


def read_result(path: Path) -> BenchResult:
    """A `result.json`, or the folder that holds it. Raises UsageError, also for a record of another version."""
    path = path / RESULT_NAME if path.is_dir() else path
    try:
        result = TypeAdapter(BenchResult).validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"`{path}`: {error.strerror}", hint="the folder that llamarack bench -o wrote") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(
            f"`{path}` is no bench result: {where}: {first['msg']}", hint="llamarack bench -o DIR"
        ) from error
    if result.schema_version != SCHEMA_VERSION:
        raise UsageError(
            f"`{path}` has schema_version {result.schema_version}, this version reads {SCHEMA_VERSION}",
            hint="measure again with this version",
        )
    return result


def read_records(path: Path, *, offset: int = 0) -> Iterable[RequestRecord]:
    """From a byte offset on. A last line that a kill cut off is skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if line.endswith(b"\n"):
                yield from_json_line(line)


def new_folder(folder: Path | None, *, kind: str = "bench", marker: str = RECORDS_NAME) -> Path:
    """Made here; a folder that holds `marker`, hence a run, is refused, so that no run mixes with another. None: a
    folder of this moment's name.
    """
    folder = folder or Path(time.strftime(f"{kind}-%Y%m%d-%H%M%S", time.gmtime()))
    if (folder / marker).exists():
        raise UsageError(f"`-o {folder}` holds a run already", hint="-o with a new folder")
    return make_run_folder(folder)


def make_run_folder(folder: Path) -> Path:
    """With those above it. One that is still empty when this program ends goes with it: what was refused, or had
    nothing to talk to, leaves no trace. Raises UsageError, also for one that holds the report of another command."""
    if (folder / REPORT_NAME).exists():
        raise UsageError(f"`-o {folder}` holds a report already", hint="-o with a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"`-o {folder}`: {error.strerror}", hint="-o DIR that can be written") from error
    atexit.register(_drop_if_empty, folder.absolute())
    return folder


def _drop_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # which is what a folder with something in it gives
        folder.rmdir()
