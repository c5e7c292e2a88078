"""A change of a rack in words, for `status`: how far it is, or why the newest went back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.markup import escape

from llamarack.units import format_duration


def change_lines(change: dict[str, Any] | None) -> Iterator[str]:
    """Nothing for one that is done."""
    if change is None or change["outcome"] in {"done", "interrupted"}:
        return
    if change["outcome"] == "running":
        way = "goes back from" if change["going_back"] else "changes to"
        now = f"; {change['now']}" if change["now"] else ""
        yield (
            f"[yellow]{way} generation {change['generation']}[/]: "
            f"{change['steps_done']} of {change['steps_total']} steps done{escape(now)}"
        )
        for replica, tally in (change["trial"] or {}).get("tallies", {}).items():
            first = format_duration(tally["median_first_token_s"])
            yield f"  {escape(replica)}: {tally['requests']} requests, {tally['failures']} failed, first token {first}"
    else:
        words = "went back" if change["outcome"] == "rolled_back" else "went back in part"
        message = escape(change["message"] or "")
        yield f"[red]the change to generation {change['generation']} {words}[/]: {message}"
    if change["hint"]:
        yield f"  [cyan]hint[/]: {escape(change['hint'])}"
