"""What short runs on this machine's cards taught the speed model: factors by card and engine version, from a file.

A factor is measured over predicted: 1 plus the error fraction that `llamarack bench FILE` reports for per-token or
first-token time. It holds for the card (or processor) and the engine version that it was measured with, and best for
models of like size, since fixed times weigh more in small ones. `bench` keeps the file, `plan` reads it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llamarack.errors import UsageError
from llamarack.paths import lasting_dir, make_private

SCHEMA_VERSION = 1
# Beyond this a factor is a mistake in the file or a model of the card that is not worth correcting.
_LARGEST_FACTOR = 20.0
_NAME = "calibration.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`decode_bytes`: of the model it was measured with, all that one step reads. `levels`: loads it is the mean of."""

    card: str  # as the driver names it; several kinds: `A + B`; without cards the processor's name
    engine: str
    engine_version: str
    per_token_factor: float = 1.0
    first_token_factor: float = 1.0
    decode_bytes: int | None = None
    measured_unix_s: int | None = None
    levels: int | None = None


def read_calibrations(path: Path) -> tuple[Calibration, ...]:
    """`{"schema_version": 1, "calibrations": [{"card", "engine", "engine_version", ...}]}`.

    Raises UsageError naming the key at fault.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"`--calibration`: `{path}` cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"`--calibration`: `{path}` is not JSON: {error}") from error
    from pydantic import TypeAdapter, ValidationError  # a start without such a file waits for no checker of it

    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(f"`--calibration`: `{path}` has schema_version `{version}`, this reads {SCHEMA_VERSION}")
    try:
        found = TypeAdapter(tuple[Calibration, ...]).validate_python(value.get("calibrations"))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, ("calibrations", *fault["loc"])))
        raise UsageError(f"`--calibration`: `{path}`: `{key}`: {fault['msg'].lower()}") from None
    _require_factors(found, path)
    return found


def _require_factors(found: Sequence[Calibration], path: Path) -> None:
    for one in found:
        for factor in (one.per_token_factor, one.first_token_factor):
            if not 1 / _LARGEST_FACTOR <= factor <= _LARGEST_FACTOR:
                bounds = f"{1 / _LARGEST_FACTOR:g} to {_LARGEST_FACTOR:g}"
                raise UsageError(
                    f"`--calibration`: `{path}`: factors are {bounds}, {factor} given",
                    hint="a factor is measured over predicted time",
                )


def calibration_path() -> Path:
    """Where `bench` keeps what it learnt of this machine."""
    return lasting_dir() / _NAME


def own_calibrations() -> tuple[Calibration, ...]:
    """This machine's; none where nothing was measured yet. Raises UsageError for a damaged file."""
    path = calibration_path()
    return read_calibrations(path) if path.exists() else ()


def remember(lesson: Calibration, path: Path) -> None:
    """Adds a lesson in place of an older one of the same card, engine, version and model size. Whole or not at all.

    Raises UsageError where the file is damaged or cannot be written, or where the factor is beyond all reason.
    """
    _require_factors((lesson,), path)
    make_private(path.parent)
    before = read_calibrations(path) if path.exists() else ()
    kept = [one for one in before if _subject(one) != _subject(lesson)]
    value = {"schema_version": SCHEMA_VERSION, "calibrations": [asdict(one) for one in (*kept, lesson)]}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"`{path}` cannot be written: {error.strerror or error}") from error


def _subject(one: Calibration) -> tuple[object, ...]:
    return one.card, one.engine, one.engine_version, one.decode_bytes


def best_calibration(
    known: Sequence[Calibration], *, card: str, engine: str, engine_version: str | None, decode_bytes: int
) -> Calibration | None:
    """Of this card, engine and version (any version where the plan names none), measured with the model nearest in
    size; of equals the newest.
    """
    fit = [
        one
        for one in known
        if (one.card, one.engine) == (card, engine) and engine_version in (None, one.engine_version)
    ]

    def distance(one: Calibration) -> tuple[float, int]:
        apart = abs(math.log(one.decode_bytes / decode_bytes)) if one.decode_bytes else math.inf
        return apart, -(one.measured_unix_s or 0)

    return min(fit, key=distance, default=None)
