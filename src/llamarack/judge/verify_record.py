"""The `verify` result record: what other programs read. `verify.json` beside the two saved runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from llamarack.errors import UsageError
from llamarack.judge.verify_result import VerifyResult

RESULT_NAME = "verify.json"


def to_json(result: VerifyResult) -> bytes:
    return orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def json_schema() -> dict[str, Any]:
    return TypeAdapter(VerifyResult).json_schema(mode="serialization")


def write_result(result: VerifyResult, path: Path) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(to_json(result))
    partial.replace(path)


def read_result(path: Path) -> VerifyResult:
    """A `verify.json`, or the folder that holds it. Raises UsageError."""
    path = path / RESULT_NAME if path.is_dir() else path
    try:
        return TypeAdapter(VerifyResult).validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"`{path}`: {error.strerror}", hint="llamarack verify ... -o DIR writes one") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(f"`{path}` is no verify result: {where}: {first['msg']}", hint="verify again") from error
