"""How commands speak to people: stderr, readable without colour, errors with their hint."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING

import orjson

from llamarack.errors import LlamarackError
from llamarack.logs import FORMAT_VARIABLE, LogFormat, log_format, turn_own_log
from llamarack.supervise.journal import Entry

if TYPE_CHECKING:
    from rich.console import Console

_MARKS = {"info": "[dim]·[/]", "warning": "[yellow]![/]", "error": "[red]✗[/]"}


@cache
def _console(name: str) -> Console:
    """Made when it is first asked for: a start has nothing to print until its engine loads."""
    from rich.console import Console

    if name == "people":
        return Console(stderr=True, highlight=False, soft_wrap=True)
    # A pipe has no width; tables keep their columns there.
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def __getattr__(name: str) -> Console:
    """`people`: stderr; `data`: stdout."""
    if name not in {"people", "data"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _console(name)


def typed(command: str) -> str:
    """A command line of ours as it can be typed here: an environment that is not activated has it by its path only."""
    program = sys.argv[0]
    name, _, rest = command.partition(" ")
    if name != "llamarack" or os.path.basename(program) != name:
        return command
    from shutil import which

    return command if which(name) else f"{program} {rest}".rstrip()


def print_error(error: LlamarackError) -> None:
    """The reason of an end; an object like the events where those are objects."""
    if os.environ.get(FORMAT_VARIABLE) == LogFormat.JSON:
        value = {"kind": error.code, "severity": "error", "message": error.message, "hint": error.hint}
        sys.stderr.buffer.write(orjson.dumps({"time_unix_s": time.time(), **value}, option=orjson.OPT_APPEND_NEWLINE))
        sys.stderr.flush()
        return
    from rich.markup import escape

    _console("people").print(f"[bold red]error[/]: {escape(error.message)}")
    if error.hint:
        _console("people").print(f"\n[cyan]hint[/]: {escape(typed(error.hint))}")


def log_entry(entry: Entry) -> None:
    """The journal as a log: for people, or as the records themselves where JSON was asked for."""
    turn_own_log()
    if log_format() is LogFormat.JSON:
        sys.stderr.buffer.write(orjson.dumps(asdict(entry), option=orjson.OPT_APPEND_NEWLINE))
        sys.stderr.flush()
    else:
        print_entry(entry)


def print_entry(entry: Entry) -> None:
    """One line of the journal as it happens."""
    from rich.markup import escape

    clock = time.strftime("%H:%M:%S", time.localtime(entry.time_unix_s))
    mark = "[green]✓[/]" if entry.kind == "ready" else _MARKS[entry.severity]
    who = f"[bold]{escape(entry.replica)}[/] " if entry.replica else ""
    _console("people").print(f"{clock} {mark} {who}{escape(entry.message)}")
    hint = entry.data.get("hint")
    if hint:
        _console("people").print(f"           [cyan]hint[/]: {escape(str(hint))}")


def print_json(text: bytes) -> None:
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()
