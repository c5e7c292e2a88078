"""`llamarack status`: what runs, as a table or as the record itself."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.live import Live

from llamarack.cli import status_text
from llamarack.cli.change_text import change_lines
from llamarack.cli.console import data, people, print_entry, print_json
from llamarack.cli.serve import StateDir
from llamarack.errors import UsageError
from llamarack.judge.proofs import read_proofs
from llamarack.paths import RackPaths, rack_paths
from llamarack.paths import state_dir as state_folder
from llamarack.supervise import admin
from llamarack.supervise.admin import ask
from llamarack.supervise.journal import Entry
from llamarack.supervise.rack_lock import is_running

_FOLLOWED_FROM = 10
_WATCH_S = 1.0


def status(
    rack: Annotated[str | None, typer.Option(help="Which rack; default: the only one that runs.")] = None,
    events: Annotated[int, typer.Option("--events", min=0, help="Show this many of the newest events.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Events as they happen, until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the record.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw every second until Ctrl-C.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show models, replicas, restarts and their causes."""
    paths = rack_paths(rack or the_running_rack(state_dir), state_dir)
    if follow:
        asyncio.run(_follow(paths, events or _FOLLOWED_FROM, json))
        return
    if watch:
        if json or events:
            raise UsageError("`--watch` goes with neither --json nor --events", hint="llamarack status --watch")
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_watch(paths))
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
    record["proofs"] = proofs_record(paths, record.get("deployment_sha256"))
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


def proofs_record(paths: RackPaths, running_sha256: str | None) -> list[dict[str, Any]]:
    """What was proved of this rack; `is_current`: with the settings that run now."""
    return [
        {
            "kind": kind,
            "at_unix_s": proof.at_unix_s,
            "verdict": proof.verdict,
            "folder": proof.folder,
            "is_current": proof.deployment_sha256 == running_sha256,
        }
        for kind, proof in sorted(read_proofs(paths).items())
    ]


def the_running_rack(given: Path | None) -> str:
    """The name to use when none was given: the only rack that runs. Raises UsageError when there are several."""
    folder = state_folder(given) / "racks"
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    running = [name for name in names if is_running(rack_paths(name, given))]
    if len(running) > 1:
        raise UsageError(f"several racks run: {', '.join(running)}", hint=f"--rack {running[0]}")
    return running[0] if running else "rack"


def _print(record: dict[str, Any]) -> None:
    data.print(status_text.headline(record))
    data.print(status_text.replica_table(data, record, data.width))
    for table in (status_text.traffic_table(data, record, data.width), status_text.hardware_table(record)):
        if table is not None:
            data.print()
            data.print(table)
    for line in (*change_lines(record["change"]), *status_text.degradations(record), *status_text.deaths(record)):
        people.print(line)
    for line in status_text.proofs(record):
        data.print(line)


async def _watch(paths: RackPaths) -> None:
    """Redraws until Ctrl-C. Raises NothingRunning when the rack ends."""
    screen = Console(highlight=False)
    if not screen.is_terminal:
        raise UsageError("--watch draws on a terminal and stdout is none", hint="llamarack status --json, in a loop")
    record = await ask(paths, {"op": "status"})
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            live.update(status_text.watched(screen, record, screen.width, screen.height), refresh=True)
            await asyncio.sleep(_WATCH_S)
            record = await ask(paths, {"op": "status"})
