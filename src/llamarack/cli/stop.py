"""`llamarack stop`: ends a rack and waits until nothing of it is left."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from llamarack.cli.console import people
from llamarack.cli.serve import StateDir
from llamarack.cli.status import the_running_rack
from llamarack.errors import EngineError
from llamarack.paths import RackPaths, rack_paths
from llamarack.supervise.admin import ask, wait_until_gone


def stop(
    rack: Annotated[str | None, typer.Option(help="Which rack; default: the only one that runs.")] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for running requests.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the end.")] = 180.0,
    state_dir: StateDir = None,
) -> None:
    """Finish what runs, then end every process of a rack."""
    paths = rack_paths(rack or the_running_rack(state_dir), state_dir)
    asyncio.run(_stop(paths, now, timeout_s))
    people.print(f"rack {paths.name} stopped")


async def _stop(paths: RackPaths, now: bool, timeout_s: float) -> None:
    for _ in range(2 if now else 1):
        await ask(paths, {"op": "stop"})
    if not await wait_until_gone(paths, timeout_s):
        raise EngineError(
            f"rack `{paths.name}` has not ended within {timeout_s:g} s",
            hint="llamarack stop --now ends it without a drain",
        )
