"""The machine-wide lock that lets one model load at a time, whoever starts it: a rack or a Python program.

Two loads at once starve each other of disk, page cache and card memory. The lock is advisory (`flock`), so the
kernel drops it with its holder, and it is shared between users: everybody may lock the same file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from types import TracebackType

from llamarack.errors import HardwareError, NeverReady

DEFAULT_PATH = Path("/tmp/llamarack-load.lock")
PATH_VARIABLE = "LLAMARACK_LOAD_LOCK"
_POLL_S = 0.05  # flock has no deadline of its own


class LoadLock:
    """Held by one owner at a time. One object serves one load; `with` waits up to `timeout_s` and then raises."""

    def __init__(self, *, timeout_s: float = 3600.0, path: Path | None = None) -> None:
        self.path = path or Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)
        self.timeout_s = timeout_s
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def try_acquire(self) -> bool:
        """Takes the lock if it is free, at once. Raises HardwareError where the lock file cannot be opened."""
        if self._descriptor is not None:
            raise RuntimeError("this LoadLock is held already")
        descriptor = _open(self.path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        if not _is_still_at(descriptor, self.path):  # a cleaner of /tmp took the file away: this lock guards nothing
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        _write_holder(descriptor)
        return True

    def acquire(self, timeout_s: float | None = None) -> None:
        """Waits for the lock; raises NeverReady past the deadline, naming the holder where it is known."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_monotonic_s = time.monotonic() + limit_s
        while not self.try_acquire():
            if time.monotonic() >= deadline_monotonic_s:
                holder = self.holder_pid()
                raise NeverReady(
                    f"another model has been loading for over {limit_s:g} s"
                    + (f" (process {holder} holds `{self.path}`)" if holder else f" (`{self.path}` is held)"),
                    hint=f"wait for it, or see who it is: `fuser -v {self.path}`",
                )
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Gives the lock back; does nothing when it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def holder_pid(self) -> int | None:
        """The last process that took the lock, as it wrote itself down; None where that cannot be read."""
        try:
            return int(self.path.read_bytes()[:20])
        except (OSError, ValueError):
            return None

    def __enter__(self) -> LoadLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def _open(path: Path) -> int:
    # Without O_CREAT first: in a sticky folder the kernel refuses O_CREAT on another user's file
    # (sysctl fs.protected_regular). O_NONBLOCK: a FIFO put there must not hang the open.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            descriptor = _create(path, flags)
        except PermissionError:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # flock needs no write access
    except OSError as error:
        what = "a symbolic link" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
        raise _unusable(path, what) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _unusable(path, "not a regular file")
    return descriptor


def _create(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # somebody was faster
        return os.open(path, flags)
    os.fchmod(descriptor, 0o666)  # the umask took bits away that other users need
    return descriptor


def _unusable(path: Path, what: str) -> HardwareError:
    return HardwareError(
        f"the load lock `{path}` cannot be used: {what}",
        hint=f"remove it, or name another file: `export {PATH_VARIABLE}=$HOME/.llamarack-load.lock`",
    )


def _is_still_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _write_holder(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    except OSError:  # opened read-only, or the disk is full: the lock holds all the same
        pass
