"""One supervisor a rack: who holds its lock, and whether anybody does."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from llamarack.errors import UsageError
from llamarack.paths import RackPaths


class RackLock:
    """One supervisor a rack. The kernel drops it with its holder, so a killed supervisor blocks nobody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def take(self, rack: str) -> None:
        """Raises UsageError when another supervisor holds it."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.read(fd, 32).decode().strip() or "unknown"
            os.close(fd)
            raise UsageError(
                f"rack `{rack}` is already running (process {pid})",
                hint=f"llamarack status --rack {rack}; llamarack stop --rack {rack}; or another name with --rack",
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        self._fd = fd

    def drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_running(paths: RackPaths) -> bool:
    """Whether a supervisor holds the rack's lock."""
    try:
        fd = os.open(paths.lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def lock_holder(paths: RackPaths) -> int | None:
    """The process that holds, or held last, the rack's lock."""
    try:
        return int(paths.lock.read_text())
    except (OSError, ValueError):
        return None
