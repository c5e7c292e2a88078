"""Reads a JSON object from a file that may be anything, at a bounded cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from llamarack.errors import ModelError
from llamarack.model.foreign import SNIFF_BYTES, stand_in

CONFIG_MAX_BYTES = 4 * 1024**2  # config.json has 1 kB, tokenizer_config.json of LLaMA-3 51 kB
DAMAGED = "the file is damaged or foreign: copy or download it again"


def read_object(path: Path, *, max_bytes: int = CONFIG_MAX_BYTES) -> dict[str, Any]:
    """Raises ModelError for anything but a JSON object within the bound; OSError as the system gives."""
    size_bytes = path.stat().st_size
    if size_bytes > max_bytes:
        raise ModelError(f"`{path}` has {size_bytes:,} bytes, the bound is {max_bytes:,}", hint=DAMAGED)
    with path.open("rb") as file:
        raw = file.read(max_bytes)
    if failed := stand_in(path, raw[:SNIFF_BYTES]):
        raise failed
    return parse_object(raw, str(path))


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(raw)  # refuses nesting deeper than 1024 and text that is not UTF-8
    except orjson.JSONDecodeError as error:
        raise ModelError(f"`{where}` is not JSON: {error}", hint=DAMAGED) from error
    if not isinstance(parsed, dict):
        raise ModelError(f"`{where}` holds a JSON {type(parsed).__name__}, not an object", hint=DAMAGED)
    return parsed
