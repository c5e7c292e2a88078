"""How commands speak to people: stderr, readable without colour, errors with their hint."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.markup import escape

from llamarack.errors import LlamarackError
from llamarack.supervise.journal import Entry

people = Console(stderr=True, highlight=False, soft_wrap=True)
# A pipe has no width; tables keep their columns there.
data = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
_MARKS = {"info": "[dim]·[/]", "warning": "[yellow]![/]", "error": "[red]✗[/]"}


def print_error(error: LlamarackError) -> None:
    people.print(f"[bold red]error[/]: {escape(error.message)}")
    if error.hint:
        people.print(f"\n[cyan]hint[/]: {escape(error.hint)}")


def print_entry(entry: Entry) -> None:
    """One line of the journal as it happens."""
    clock = time.strftime("%H:%M:%S", time.localtime(entry.time_unix_s))
    mark = "[green]✓[/]" if entry.kind == "ready" else _MARKS[entry.severity]
    who = f"[bold]{escape(entry.replica)}[/] " if entry.replica else ""
    people.print(f"{clock} {mark} {who}{escape(entry.message)}")
    hint = entry.data.get("hint")
    if hint:
        people.print(f"           [cyan]hint[/]: {escape(str(hint))}")


def print_json(text: bytes) -> None:
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()
