"""What no command caught: a sentence for what the system refused, a kept record for a fault of our own. No traceback.

`LLAMARACK_TRACEBACK=1` shows the traceback instead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import traceback
from pathlib import Path

import orjson

from llamarack.errors import HardwareError, LlamarackError, UsageError
from llamarack.paths import faults_dir, make_private, state_dir
from llamarack.version import __version__

VARIABLE = "LLAMARACK_TRACEBACK"
_MOST_KEPT = 20
_OF_THE_MACHINE = {
    errno.ENOSPC: "make room there, or name another disk",
    errno.EDQUOT: "your quota there is used up: make room, or name another disk",
    errno.EROFS: "that file system is read-only: name another folder",
    errno.EIO: "the disk fails: see the kernel's log (dmesg)",
    errno.EMFILE: "raise the limit of open files: ulimit -n 65536",
    errno.ENFILE: "the machine has no open file left: see /proc/sys/fs/file-nr",
    errno.ENOMEM: "the machine's memory is used up: see free -h",
}
_OF_THE_PATH = {
    errno.ENOENT: "see what is there: ls -la {folder}",
    errno.EACCES: "see who may use it: ls -ld {folder} {path}",
    errno.EPERM: "see who may use it: ls -ld {folder} {path}",
    errno.EISDIR: "that is a folder: name a file in it",
    errno.ENOTDIR: "a part of that path is a file, not a folder",
    errno.ENAMETOOLONG: "a shorter name",
    errno.ELOOP: "a link there leads to itself",
}


def as_told(error: Exception) -> LlamarackError:
    """What to print and exit with. Raises `error` itself where its traceback was asked for."""
    if os.environ.get(VARIABLE):
        raise error
    if isinstance(error, OSError) and (refused := _refused(error)):
        return refused
    place = _place(error)
    message = f"internal fault: {type(error).__name__}: {_first_line(error)}{f' ({place})' if place else ''}"
    kept = _keep(error)
    told = f"its record is in {kept}, and `llamarack support` collects it" if kept else f"{VARIABLE}=1 shows all of it"
    return LlamarackError(message, hint=f"this is a fault of llamarack, not of what you typed; {told}")


def _refused(error: OSError) -> LlamarackError | None:
    """What the system said about the machine or a path; None where that is no answer, such as for a socket."""
    number, reason = error.errno or 0, error.strerror or str(error)
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    where = f"`{path}`: " if path else ""
    if number in _OF_THE_MACHINE:
        hint = _OF_THE_MACHINE[number]
        if path is None and number in (errno.ENOSPC, errno.EDQUOT):  # of a write: which file, the system does not say
            hint = f"df -h {state_dir()} . shows which disk; LLAMARACK_STATE_DIR=/a/larger/disk names another"
        return HardwareError(f"{where}{reason}", hint=hint)
    if path is None or number not in _OF_THE_PATH:
        return None
    folder = path.absolute().parent
    hint = _OF_THE_PATH[number].format(path=path, folder=folder)
    if number == errno.ENOENT and not folder.exists():
        hint = f"make the folder first: mkdir -p {folder}"
    return UsageError(f"{where}{reason}", hint=hint)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["without a message"])[0][:300]


def _place(error: Exception) -> str:
    """The innermost line of ours: `plan/planner.py:138`."""
    root = Path(__file__).parent.parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if root in Path(frame.filename).parents]
    return f"{Path(frames[-1].filename).relative_to(root)}:{frames[-1].lineno}" if frames else ""


def _keep(error: Exception) -> Path | None:
    """A new file of `faults_dir`, the oldest beyond the bound removed; None where nothing can be written."""
    record = {
        "time_unix_s": time.time(),
        "llamarack": __version__,
        "python": sys.version.split()[0],
        "command": sys.argv[1:2],
        "traceback": [line for part in traceback.format_exception(error) for line in part.splitlines()],
    }
    with contextlib.suppress(OSError, LlamarackError):
        folder = make_private(faults_dir())
        path = folder / f"{int(time.time())}-{os.getpid()}.json"
        path.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2))
        for old in sorted(folder.glob("*.json"))[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)
        return path
    return None
