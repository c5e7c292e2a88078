"""`llamarack status`: what runs, as a table or as the record itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from llamarack.cli.console import data, people, print_entry, print_json
from llamarack.cli.serve import StateDir
from llamarack.errors import UsageError
from llamarack.paths import RackPaths, rack_paths
from llamarack.paths import state_dir as state_folder
from llamarack.supervise import admin
from llamarack.supervise.admin import ask
from llamarack.supervise.journal import Entry
from llamarack.supervise.supervisor import is_running
from llamarack.units import format_bytes, format_duration

_FOLLOWED_FROM = 10
_STYLES = {"ready": "green", "failed": "red", "backoff": "red", "stopped": "dim"}


def status(
    rack: Annotated[str | None, typer.Option(help="Which rack; default: the only one that runs.")] = None,
    events: Annotated[int, typer.Option("--events", min=0, help="Show this many of the newest events.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Events as they happen, until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the record.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show models, replicas, restarts and their causes."""
    paths = rack_paths(rack or the_running_rack(state_dir), state_dir)
    if follow:
        asyncio.run(_follow(paths, events or _FOLLOWED_FROM, json))
        return
    if events:
        record = asyncio.run(ask(paths, {"op": "events", "limit": events}))
        if json:
            print_json(orjson.dumps(record))
        else:
            for entry in record["events"]:
                print_entry(Entry(**entry))
        return
    record = asyncio.run(ask(paths, {"op": "status"}))
    if json:
        print_json(orjson.dumps(record))
    else:
        _print(record)


async def _follow(paths: RackPaths, limit: int, json: bool) -> None:
    async for entry in admin.follow(paths, limit):
        if json:
            print_json(orjson.dumps(entry))
        else:
            print_entry(Entry(**entry))


def the_running_rack(given: Path | None) -> str:
    """The name to use when none was given: the only rack that runs. Raises UsageError when there are several."""
    folder = state_folder(given) / "racks"
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    running = [name for name in names if is_running(rack_paths(name, given))]
    if len(running) > 1:
        raise UsageError(f"several racks run: {', '.join(running)}", hint=f"--rack {running[0]}")
    return running[0] if running else "rack"


def _print(record: dict[str, Any]) -> None:
    gateway = record["gateway"]
    scheme = "https" if gateway["tls"] else "http"
    data.print(
        f"rack [bold]{escape(record['rack'])}[/]  {scheme}://{gateway['host']}:{gateway['port']}/v1  "
        f"up {format_duration(record['time_unix_s'] - record['started_unix_s'])}  "
        f"running {gateway['running']}  waiting {gateway['queued']}"
        + ("  [yellow]draining[/]" if record["draining"] else "")
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("model", "replica", "state", "engine", "pid", "busy", "context", "planned", "resident", "restarts"):
        right = column in {"pid", "busy", "context", "planned", "resident", "restarts"}
        table.add_column(column, justify="right" if right else "left")
    for model in record["models"]:
        for replica in model["replicas"]:
            table.add_row(*_row(model["name"], replica))
    data.print(table)
    for model in record["models"]:
        for replica in model["replicas"]:
            _print_degraded(replica)
            _print_death(replica)


def _row(model: str, replica: dict[str, Any]) -> list[str]:
    style = _STYLES.get(replica["state"], "yellow")
    return [
        escape(model),
        replica["id"],
        f"[{style}]{replica['state']}[/]{_progress(replica)}",
        replica["engine"],
        str(replica["pid"] or "–"),
        f"{replica['running']}/{replica['slots_total']}",
        f"{replica['context_tokens']:,}",
        format_bytes(replica["predicted"]["total_bytes"]),
        format_bytes(replica["actual"]["resident_bytes"]),
        str(replica["restarts"]),
    ]


def _progress(replica: dict[str, Any]) -> str:
    loading = replica["loading"]
    return "" if loading is None or loading["fraction"] is None else f" {100 * loading['fraction']:.0f} %"


def _print_degraded(replica: dict[str, Any]) -> None:
    was = replica["degraded_from"]
    if was is None:
        return
    steps = ", ".join(f"{step['setting']} {_step(step['was'])} -> {_step(step['becomes'])}" for step in was["steps"])
    people.print(f"{replica['id']}: [yellow]degraded after out of memory[/]: {escape(steps)}")
    people.print("  [cyan]hint[/]: the deployment file still asks for more; llamarack plan FILE shows what fits")


def _step(value: float | str) -> str:
    return Path(value).name if isinstance(value, str) else f"{value:g}"


def _print_death(replica: dict[str, Any]) -> None:
    death = replica["last_death"]
    if death is None:
        return
    ago = format_duration(time.time() - death["at_unix_s"])
    people.print(f"{replica['id']}: {escape(death['message'])} (while {death['while']}, {ago} ago)")
    if death["hint"]:
        people.print(f"  [cyan]hint[/]: {escape(death['hint'])}")
