"""Recorded machines and copies of them with one thing changed."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"


def nvml_record(name: str = "h200_x2") -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return record


def changed(record: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A copy in which `change` altered one thing in place."""
    changed_copy = copy.deepcopy(record)
    change(changed_copy)
    return changed_copy


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
