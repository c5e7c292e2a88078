"""The `compare` result record: what other programs read. `compare.json` in the output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from llamarack.judge.compare import CompareResult

RESULT_NAME = "compare.json"


def to_json(result: CompareResult) -> bytes:
    return orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def json_schema() -> dict[str, Any]:
    return TypeAdapter(CompareResult).json_schema(mode="serialization")


def write_result(result: CompareResult, path: Path) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(to_json(result))
    partial.replace(path)
