"""The end of an engine's log."""

from __future__ import annotations

import os
from pathlib import Path

# Every rank of a vLLM prints some 10 KB of traceback after the line that tells the cause.
_LOG_TAIL_BYTES = 262_144


def end_of(path: Path) -> int:
    """Bytes that it has now: a start that fails before it writes must not be judged by the lines of the one before."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_tail(path: Path, since_bytes: int = 0) -> list[str]:
    """The last lines of a log, undecodable bytes replaced; empty when there is none.

    `since_bytes`: where this start's part begins; a log that is shorter was turned over meanwhile and is read whole.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since_bytes if since_bytes <= size else 0, size - _LOG_TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
