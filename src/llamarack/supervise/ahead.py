"""Loading the model of a rack that starts again before its plan is made: with what its last start was told.

At a start that worked the worker's options are remembered, with the files they were for and the memory they took. If
nothing of that has changed when the same rack starts again, its worker begins to load at once, under the machine's load
lock, and the plan is made meanwhile. It stays only if the plan comes to the very same options; else it is ended and
started as planned. Nothing is loaded ahead that might not fit, or beside a rack that runs or whose supervisor died: its
engines may live, and are taken back.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarack.paths import RackPaths

if TYPE_CHECKING:
    from llamarack.hardware.loadlock import LoadLock

SCHEMA_VERSION = 1
_FILE = "ahead.json"
_ROOM_FACTOR = 1.25  # of what the plan called the most it takes
_ROOM_BYTES = 512 * 1024**2  # and what else is about to start


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """`options`: what the worker was given in place of the file that `argv` ends with. `lock`: held."""

    argv: Sequence[str]
    options: str
    key: str
    lock: LoadLock

    def is_asked_for(self, argv: Sequence[str]) -> bool:
        """Whether a start with `argv`, whose file of options was written by now, would be the same."""
        try:
            return list(argv) == list(self.argv) and Path(argv[-1]).read_text(encoding="utf-8") == self.options
        except OSError:
            return False


def remember(paths: RackPaths, replica: str, argv: Sequence[str], model: Path, needs_bytes: int) -> None:
    """After a start that worked, of a worker on the processor. A disk that refuses costs time at the next start."""
    path = paths.folder / "replicas" / replica / _FILE
    with contextlib.suppress(OSError):
        value = {
            "schema_version": SCHEMA_VERSION,
            "argv": list(argv),
            "options": Path(argv[-1]).read_text(encoding="utf-8"),
            "files": {str(file): _state_of(file) for file in (model, Path(argv[0]), Path(argv[2]))},
            "needs_bytes": needs_bytes,
        }
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(value), encoding="utf-8")
        os.replace(fresh, path)


def forget(paths: RackPaths, replica: str) -> None:
    """Before a start, so that one that fails is not repeated unasked."""
    with contextlib.suppress(OSError):
        (paths.folder / "replicas" / replica / _FILE).unlink(missing_ok=True)


def take_ahead(paths: RackPaths, replica: str, worker: Sequence[str]) -> Ahead | None:
    """What the last start of the replica tells to load now; None where nothing may be."""
    value = _read(paths.folder / "replicas" / replica / _FILE)
    if value is None or value["argv"][: len(worker)] != list(worker):
        return None
    from llamarack.errors import HardwareError  # only here, since most starts have nothing to load ahead
    from llamarack.hardware.host import read_host
    from llamarack.hardware.loadlock import LoadLock
    from llamarack.supervise.rack_lock import is_running

    try:
        if paths.state.exists() or any(_state_of(Path(file)) != state for file, state in value["files"].items()):
            return None
        room_bytes = read_host().memory_available_bytes
        if room_bytes < value["needs_bytes"] * _ROOM_FACTOR + _ROOM_BYTES or is_running(paths):
            return None
        folder = paths.sockets.lstat()
        if folder.st_uid != os.getuid() or folder.st_mode & 0o077 or not paths.sockets.is_dir():
            return None
        lock = LoadLock()
        if not lock.try_acquire():
            return None
        paths.engine_socket(replica).unlink(missing_ok=True)  # of one that was killed
    except (OSError, HardwareError):
        return None
    return Ahead(argv=value["argv"], options=value["options"], key=secrets.token_urlsafe(32), lock=lock)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_ours = value["schema_version"] == SCHEMA_VERSION and {"argv", "options", "files", "needs_bytes"} <= {*value}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if is_ours else None


def _state_of(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]
