"""What happened, in order: one JSON object a line, in a file that is rotated, and the newest in memory.

A full or unwritable disk costs lines in the file, never the service; the loss is told in `lost`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

SCHEMA_VERSION = 1
_MAX_BYTES = 8 * 1024**2
_KEPT_IN_MEMORY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`kind`: a stable word for programs; `message`: one line for people; `severity`: info, warning, error."""

    time_unix_s: float
    kind: str
    severity: str
    message: str
    replica: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


class Journal:
    """`on_entry` callbacks see every entry once, after it was written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.recent: deque[Entry] = deque(maxlen=_KEPT_IN_MEMORY)
        self.on_entry: list[Callable[[Entry], None]] = []
        self.lost = 0

    def note(self, kind: str, message: str, *, replica: str | None = None, **data: Any) -> None:
        self._write("info", kind, message, replica, data)

    def warn(self, kind: str, message: str, *, replica: str | None = None, **data: Any) -> None:
        self._write("warning", kind, message, replica, data)

    def error(self, kind: str, message: str, *, replica: str | None = None, **data: Any) -> None:
        self._write("error", kind, message, replica, data)

    def _write(self, severity: str, kind: str, message: str, replica: str | None, data: dict[str, Any]) -> None:
        entry = Entry(
            time_unix_s=time.time(), kind=kind, severity=severity, message=message, replica=replica, data=data
        )
        self.recent.append(entry)
        try:
            self._rotate()
            with open(self._path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(orjson.dumps(asdict(entry), option=orjson.OPT_APPEND_NEWLINE))
        except OSError:
            self.lost += 1
        for callback in self.on_entry:
            callback(entry)

    def _rotate(self) -> None:
        if self._path.exists() and self._path.stat().st_size > _MAX_BYTES:
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))


def read_entries(path: Path, limit: int) -> list[Entry]:
    """The newest `limit` entries of a journal file; damaged lines (a crash in mid-write) are passed over."""
    entries: list[Entry] = []
    for part in (path.with_name(path.name + ".1"), path):
        try:
            lines = part.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines[-limit:]:
            try:
                entries.append(Entry(**orjson.loads(line)))
            except (orjson.JSONDecodeError, TypeError):
                continue
    return entries[-limit:]
