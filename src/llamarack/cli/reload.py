"""`llamarack reload`: brings a running rack to what its file says now, one replica at a time, no request lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from llamarack.cli.console import people, print_entry
from llamarack.cli.serve import StateDir
from llamarack.cli.serving import load_target
from llamarack.cli.status import the_running_rack
from llamarack.config import plain
from llamarack.errors import UsageError
from llamarack.gateway.keys import read_keys
from llamarack.paths import RackPaths, rack_paths
from llamarack.supervise.admin import ask
from llamarack.supervise.journal import Entry
from llamarack.units import format_duration, parse_duration_s

_PREPARE_TIMEOUT_S = 300.0  # an engine is asked for its options first
_FOLLOW_S = 0.3
_EVENTS = 200


def reload(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Another deployment file; default: the rack's own, read again."),
    ] = None,
    rack: Annotated[str | None, typer.Option(help="Which rack; default: the only one that runs.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, do nothing.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Replace unchanged replicas too (an engine was updated in place).")
    ] = False,
    canary: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION", help="First try one new replica with this fraction of the requests, 0.01 to 0.5."
        ),
    ] = None,
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="How long the trial lasts: 90s, 10m.")] = "5m",
    abort: Annotated[bool, typer.Option("--abort", help="Bring a change that runs back to where it began.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Change a running rack to its edited file. New replicas warm up before old ones go, and a failure goes back.

    Exit codes: 0 done or nothing to do, 2 refused, 4 no room, 5 a new replica did not become ready, 6 the trial was
    lost, 7 the trial saw too little; from 4 on everything serves as before.
    """
    paths = rack_paths(rack or the_running_rack(state_dir), state_dir)
    trial = _trial(canary, for_)
    if abort:
        raise typer.Exit(asyncio.run(_abort(paths)))
    raise typer.Exit(asyncio.run(_reload(paths, file, dry_run=dry_run, restart=restart, trial=trial)))


def _trial(share: float | None, for_: str) -> dict[str, float] | None:
    if share is None:
        return None
    if not 0.01 <= share <= 0.5:
        raise UsageError(f"--canary: a fraction from 0.01 to 0.5, {share:g} given", hint="--canary 0.1")
    try:
        for_s = parse_duration_s(for_)
    except ValueError as error:
        raise UsageError(f"--for: {error}", hint="--for 5m") from None
    if not 1 <= for_s <= 86_400:
        raise UsageError(f"--for: from 1 s to 24 h, {format_duration(for_s)} given", hint="--for 5m")
    return {"share": share, "for_s": for_s}


async def _reload(
    paths: RackPaths, file: Path | None, *, dry_run: bool, restart: bool, trial: dict[str, float] | None
) -> int:
    status = await ask(paths, {"op": "status"})
    source = status["source"]
    if file is None and source is None:
        raise UsageError(f"rack `{paths.name}` was not started from a file", hint="llamarack reload FILE")
    target = file.absolute() if file is not None else Path(source["path"])
    said = {"host": source["host"], "port": source["port"]} if source else {"host": None, "port": None}
    deployment = load_target(target, **said)
    if deployment.gateway.api_keys_file is not None:
        read_keys(deployment.gateway.api_keys_file)
    request = {
        "op": "reload",
        "deployment": plain(deployment),
        "source": {"path": str(target), **said},
        "restart": restart,
        "trial": trial,
        "dry_run": dry_run,
    }
    begun = await ask(paths, request, timeout_s=_PREPARE_TIMEOUT_S)
    for warning in begun["warnings"]:
        people.print(f"[yellow]![/] {escape(warning)}")
    if begun["unchanged"]:
        people.print(f"nothing to do: rack {paths.name} is what {escape(target.name)} asks for")
        return 0
    if dry_run:
        people.print(f"would change to generation {begun['generation']}:")
        for number, step in enumerate(begun["steps"] or ["settings alone, no replica is touched"], start=1):
            people.print(f"  {number}. {escape(step)}")
        return 0
    if source and Path(source["path"]) != target:
        people.print(f"[dim]a later `llamarack serve {escape(source['path'])}` would change back to that file[/]")
    return await _follow(paths, begun["generation"], status["time_unix_s"])


async def _follow(paths: RackPaths, generation: int, since_unix_s: float) -> int:
    """Prints the journal until the change has ended; its exit code."""
    last = since_unix_s
    try:
        while True:
            change = (await ask(paths, {"op": "status"}))["change"]
            record = await ask(paths, {"op": "events", "limit": _EVENTS})
            for entry in (Entry(**each) for each in record["events"]):
                if entry.time_unix_s > last:
                    last = entry.time_unix_s
                    print_entry(entry)
            if change is None or change["generation"] != generation or change["outcome"] != "running":
                return _tell(change, paths)
            await asyncio.sleep(_FOLLOW_S)
    except asyncio.CancelledError:
        people.print(
            f"\nthe change goes on: llamarack status --rack {paths.name} follows it, "
            f"llamarack reload --rack {paths.name} --abort brings it back"
        )
        raise


def _tell(change: dict[str, Any] | None, paths: RackPaths) -> int:
    if change is None:
        return 0
    took = format_duration(change["ended_unix_s"] - change["started_unix_s"])
    if change["outcome"] == "done":
        people.print(f"[bold green]done[/]  generation {change['generation']} serves, after {took}")
        return 0
    words = {
        "rolled_back": "went back: everything serves as before",
        "incomplete": f"went back in part: llamarack status --rack {paths.name} shows what is missing",
        "interrupted": "the rack was stopped meanwhile",
    }[change["outcome"]]
    people.print(f"[bold red]{words}[/], after {took}: {escape(change['message'] or '')}")
    if change["hint"]:
        people.print(f"\n[cyan]hint[/]: {escape(change['hint'])}")
    return int(change["exit_code"]) or 5


async def _abort(paths: RackPaths) -> int:
    status = await ask(paths, {"op": "status"})
    answer = await ask(paths, {"op": "abort"})
    if not answer["running"]:
        people.print(f"rack {paths.name} is not changing")
        return 0
    await _follow(paths, status["change"]["generation"], status["time_unix_s"])
    return 0
