"""What short runs on this machine's cards taught the speed model: factors by card and engine version, from a file.

A factor is measured over predicted: 1 plus the error fraction that `llamarack bench` reports for per-token or
first-token time. It holds for the card and engine version it was measured with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from llamarack.errors import UsageError

SCHEMA_VERSION = 1
# Beyond this a factor is a mistake in the file or a model of the card that is not worth correcting.
_LARGEST_FACTOR = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    card: str  # as the driver names it
    engine: str
    engine_version: str
    per_token_factor: float = 1.0
    first_token_factor: float = 1.0


_CALIBRATIONS = TypeAdapter(tuple[Calibration, ...])


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
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(f"`--calibration`: `{path}` has schema_version `{version}`, this reads {SCHEMA_VERSION}")
    try:
        found = _CALIBRATIONS.validate_python(value.get("calibrations"))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, ("calibrations", *fault["loc"])))
        raise UsageError(f"`--calibration`: `{path}`: `{key}`: {fault['msg'].lower()}") from None
    for one in found:
        for factor in (one.per_token_factor, one.first_token_factor):
            if not 1 / _LARGEST_FACTOR <= factor <= _LARGEST_FACTOR:
                bounds = f"{1 / _LARGEST_FACTOR:g} to {_LARGEST_FACTOR:g}"
                raise UsageError(
                    f"`--calibration`: `{path}`: factors are {bounds}, {factor} given",
                    hint="a factor is measured over predicted time",
                )
    return found
