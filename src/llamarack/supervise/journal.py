"""What happened, in order: one JSON object a line, in a file that is rotated, and the newest in memory.

A full or unwritable disk costs lines in the file, never the service; the loss is told in `lost`.
"""

from __future__ import annotations

import errno
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
_PASSING = (errno.ENOSPC, errno.EDQUOT)  # a disk that is full now may not be later
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
    """`on_entry` callbacks see every entry once, after it was written. A closed terminal, the end of a `| tee` or a
    full disk under a log does not end what is served: one whose output is gone for good is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.recent: deque[Entry] = deque(maxlen=_KEPT_IN_MEMORY)
        self.on_entry: list[Callable[[Entry], None]] = []
        self.lost = 0
        self._is_unwritable = False

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
        why = self._append(entry)
        for callback in [*self.on_entry]:
            try:
                callback(entry)
            except (OSError, SystemExit) as error:  # the second is rich's own answer to a broken pipe
                if getattr(error, "errno", None) not in _PASSING:
                    self.on_entry.remove(callback)
        if why is not None:
            self.lost += 1
        if (why is not None) != self._is_unwritable:
            self._is_unwritable = why is not None
            if why is not None:
                self.warn("journal_unwritable", f"`{self._path}` cannot be written: {why}; events are only shown")
            else:
                self.note("journal_writable", f"written again; {self.lost} events are not in the file", lost=self.lost)

    def _append(self, entry: Entry) -> str | None:
        """What the disk says against it, None when it was written."""
        try:
            self._rotate()
            with open(self._path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(orjson.dumps(asdict(entry), option=orjson.OPT_APPEND_NEWLINE, default=str))
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _rotate(self) -> None:
        if self._path.exists() and self._path.stat().st_size > _MAX_BYTES:
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))


def json_schema() -> dict[str, Any]:
    """Of one line of the file: `llamarack schema --record event`."""
    from pydantic import TypeAdapter  # for `schema` alone

    return TypeAdapter(Entry).json_schema(mode="serialization")


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
