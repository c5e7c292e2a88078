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
from llamarack.judge.proofs import read_proofs
from llamarack.paths import RackPaths, rack_paths
from llamarack.paths import state_dir as state_folder
from llamarack.supervise.admin import ask
from llamarack.supervise.journal import Entry
from llamarack.supervise.supervisor import is_running
from llamarack.units import format_bytes, format_duration

_STYLES = {"ready": "green", "failed": "red", "backoff": "red", "stopped": "dim"}


def status(
    rack: Annotated[str | None, typer.Option(help="Which rack; default: the only one that runs.")] = None,
    events: Annotated[int, typer.Option("--events", min=0, help="Show this many of the newest events.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the record.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show models, replicas, restarts and their causes."""
    paths = rack_paths(rack or the_running_rack(state_dir), state_dir)
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
    print_change(record["change"])
    for model in record["models"]:
        for replica in model["replicas"]:
            _print_degraded(replica)
            _print_death(replica)
    _print_proofs(record["proofs"])


def _print_proofs(proofs: list[dict[str, Any]]) -> None:
    current = [f"{one['kind']} {one['verdict']} {_ago(one)}" for one in proofs if one["is_current"]]
    if current:
        data.print(f"[dim]proved with these settings: {escape(', '.join(current))}[/]")
    for one in proofs:
        if not one["is_current"]:
            data.print(
                f"[yellow]settings changed since the last valid {one['kind']}[/] "
                f"({escape(one['verdict'])}, {_ago(one)}): llamarack acceptance FILE"
            )


def _ago(proof: dict[str, Any]) -> str:
    return f"{format_duration(time.time() - proof['at_unix_s'])} ago"


def print_change(change: dict[str, Any] | None) -> None:
    """How far a change is, or why the newest went back; nothing about one that is done."""
    if change is None or change["outcome"] in {"done", "interrupted"}:
        return
    if change["outcome"] == "running":
        way = "goes back from" if change["going_back"] else "changes to"
        now = f"; {change['now']}" if change["now"] else ""
        people.print(
            f"[yellow]{way} generation {change['generation']}[/]: "
            f"{change['steps_done']} of {change['steps_total']} steps done{escape(now)}"
        )
        for replica, tally in (change["trial"] or {}).get("tallies", {}).items():
            first = format_duration(tally["median_first_token_s"])
            people.print(
                f"  {escape(replica)}: {tally['requests']} requests, {tally['failures']} failed, first token {first}"
            )
    else:
        words = "went back" if change["outcome"] == "rolled_back" else "went back in part"
        people.print(f"[red]the change to generation {change['generation']} {words}[/]: {escape(change['message'])}")
    if change["hint"]:
        people.print(f"  [cyan]hint[/]: {escape(change['hint'])}")


def _row(model: str, replica: dict[str, Any]) -> list[str]:
    style = _STYLES.get(replica["state"], "yellow")
    return [
        escape(model),
        replica["id"],
        f"[{style}]{replica['state']}[/]",
        replica["engine"],
        str(replica["pid"] or "–"),
        f"{replica['running']}/{replica['slots_total']}",
        f"{replica['context_tokens']:,}",
        format_bytes(replica["predicted"]["total_bytes"]),
        format_bytes(replica["actual"]["resident_bytes"]),
        str(replica["restarts"]),
    ]


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
