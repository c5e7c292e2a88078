"""Form and size of logs, for every process of a rack: `$LLAMARACK_LOG_FORMAT` (text or json) and
`$LLAMARACK_LOG_MAX_BYTES` (of one log with its older part, such as 16MiB).

Engines write as they do; what llamarack itself writes is one line an event, or one JSON object a line.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
from enum import StrEnum
from pathlib import Path

import orjson

from llamarack.errors import UsageError
from llamarack.units import MIB, parse_bytes

FORMAT_VARIABLE = "LLAMARACK_LOG_FORMAT"
SIZE_VARIABLE = "LLAMARACK_LOG_MAX_BYTES"
OWN_LOG_VARIABLE = "LLAMARACK_OWN_LOG"  # the file that `serve --detach` made its child's output
_DEFAULT_MAX_BYTES = 16 * MIB
_LEAST_BYTES = 64 * 1024  # below, the reason of a death would not fit


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def log_format() -> LogFormat:
    """Raises UsageError for a word that is neither."""
    given = os.environ.get(FORMAT_VARIABLE) or LogFormat.TEXT
    try:
        return LogFormat(given)
    except ValueError:
        raise UsageError(f"{FORMAT_VARIABLE}: `{given}` is not text or json", hint=f"{FORMAT_VARIABLE}=json") from None


def log_max_bytes() -> int:
    """Of one log, its older part included. Raises UsageError for what is no size or too small."""
    given = os.environ.get(SIZE_VARIABLE)
    if not given:
        return _DEFAULT_MAX_BYTES
    try:
        size = parse_bytes(given)
    except ValueError as error:
        raise UsageError(f"{SIZE_VARIABLE}: {error}", hint=f"{SIZE_VARIABLE}=16MiB") from None
    if size < _LEAST_BYTES:
        raise UsageError(f"{SIZE_VARIABLE}: at least {_LEAST_BYTES} bytes, {given} given", hint=f"{SIZE_VARIABLE}=1MiB")
    return size


class JsonLines(logging.Formatter):
    """One object a line: `time_unix_s, level, logger, message`, and `exception` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        value = {
            "time_unix_s": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            value["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str).decode()


def set_up_logging() -> None:
    """For a process of ours whose output a keeper reads."""
    handler = logging.StreamHandler(sys.stdout)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonLines() if log_format() is LogFormat.JSON else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def turn_own_log() -> None:
    """Caps the file that `serve --detach` writes to; of other redirections nothing is known and nothing is touched."""
    path = os.environ.get(OWN_LOG_VARIABLE)
    if path is None:
        return
    try:
        status = os.fstat(2)
        is_ours = stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.stat(path))
        if is_ours and status.st_size >= log_max_bytes() // 2:
            shutil.copyfile(path, path + ".1")
            os.ftruncate(2, 0)  # it is open for appending, so what follows starts at its beginning
    except OSError:
        pass  # a full disk costs lines, not the service


def fresh_own_log(path: Path) -> int:
    """Opens it for appending and keeps the output of the last time beside it. Raises OSError."""
    if path.exists():
        os.replace(path, path.with_name(path.name + ".1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
