"""`llamarack drain`: takes one replica, or the whole rack, out of service after its running requests."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from llamarack.cli.console import people
from llamarack.cli.serve import StateDir
from llamarack.cli.status import the_running_rack
from llamarack.errors import UsageError
from llamarack.paths import rack_paths
from llamarack.supervise.admin import ask


def drain(
    replica: Annotated[str | None, typer.Argument(help="A replica's id; default: the whole rack.")] = None,
    rack: Annotated[str | None, typer.Option(help="Which rack; default: the only one that runs.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Finish what runs and stop: the whole rack, or one replica. No new request is taken meanwhile."""
    paths = rack_paths(rack or the_running_rack(state_dir), state_dir)
    if replica is None:
        asyncio.run(ask(paths, {"op": "stop"}))
        people.print(f"rack {paths.name} drains and then stops; llamarack status follows it")
        return
    answer = asyncio.run(ask(paths, {"op": "drain", "replica": replica}))
    if not answer["found"]:
        raise UsageError(
            f"no replica `{replica}` in rack `{paths.name}`", hint=f"replicas: {', '.join(answer['replicas'])}"
        )
    people.print(f"{replica} drains; llamarack status follows it")
