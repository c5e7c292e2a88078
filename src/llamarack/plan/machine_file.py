"""A machine that is not here: the hardware record that `check --json` wrote on it."""

from __future__ import annotations

import json
from pathlib import Path

from llamarack.errors import UsageError
from llamarack.hardware.machine import SCHEMA_VERSION, Machine


def read_machine(path: Path) -> Machine:
    """Takes the whole `check --json` record or its `hardware` part; keys it does not know are passed over.

    Raises UsageError naming the key at fault.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"`--gpus`: `{path}` cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"`--gpus`: `{path}` is not JSON: {error}", hint=f"llamarack check --json >{path}") from error
    from pydantic import TypeAdapter, ValidationError

    record = value.get("hardware", value) if isinstance(value, dict) else value
    try:
        machine = TypeAdapter(Machine).validate_python(record)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"])) or "the record"
        raise UsageError(
            f"`--gpus`: `{path}` is not a hardware record: `{key}`: {fault['msg'].lower()}",
            hint=f"llamarack check --json >{path}",
        ) from None
    if machine.schema_version != SCHEMA_VERSION:
        raise UsageError(
            f"`--gpus`: `{path}` has schema_version {machine.schema_version}, this llamarack reads {SCHEMA_VERSION}"
        )
    return machine
