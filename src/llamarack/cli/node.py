"""`llamarack node FILE --node-rank N`: this machine's part of a model that vLLM spreads over several machines."""

from __future__ import annotations

import asyncio
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from llamarack import config
from llamarack.cli.console import people
from llamarack.engine.adaptor import Launch, LaunchContext
from llamarack.engine.vllm import KEY_VARIABLE
from llamarack.engine.vllm_node import headless
from llamarack.errors import StartFailed, UsageError
from llamarack.paths import make_private, slug, state_dir
from llamarack.ship.spread import Spread, alone, named_spread
from llamarack.supervise.preparing import prepare


def node(
    file: Annotated[Path, typer.Argument(help="The deployment file, the same as on node 0.")],
    node_rank: Annotated[int, typer.Option("--node-rank", min=1, help="Which node this is; 0 is `llamarack serve`.")],
    model: Annotated[str | None, typer.Option(help="Which model, where several span nodes.")] = None,
    state: Annotated[Path | None, typer.Option("--state-dir", help="Folder for state.")] = None,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
) -> None:
    """Run this machine's part of a model over several machines. Node 0 serves it."""
    deployment = config.load(file).deployment
    spread = named_spread(deployment, model)
    if node_rank >= spread.nodes:
        raise UsageError(
            f"--node-rank {node_rank}: model `{spread.model.name}` has {spread.nodes} nodes",
            hint=f"--node-rank 1 to {spread.nodes - 1}; node 0 is llamarack serve {file}",
        )
    folder = make_private(state_dir(state) / "nodes" / f"{slug(spread.model.name)}-{node_rank}")
    part = _part(deployment, spread, node_rank, folder)
    if is_dry_run:
        print(shlex.join(part.argv))
        return
    ranks = "1 rank" if spread.ranks == 1 else f"{spread.ranks} ranks"
    people.print(
        f"node {node_rank} of {spread.nodes}: {escape(spread.model.name)}, {ranks} here; waits for node 0 at "
        f"{escape(spread.address)}"
    )
    try:
        os.execve(part.argv[0], list(part.argv), dict(part.env))
    except OSError as error:
        raise StartFailed(
            f"`{part.argv[0]}` cannot be started: {error.strerror}", hint="llamarack engine list"
        ) from error


def _part(deployment: config.Deployment, spread: Spread, rank: int, folder: Path) -> Launch:
    """Planned on this machine's own devices, as node 0 plans on its own."""
    spec = asyncio.run(prepare(alone(deployment, spread), None)).specs[0]
    context = LaunchContext(
        replica=spec.id,
        model=spec.model,
        group=spec.group,
        path=spec.path,
        candidate=spec.candidate,
        card_uuids=spec.card_uuids,
        files=folder,
        socket=folder / "none.sock",
        key="",
    )
    return headless(spec.adaptor.launch(context), rank, key_variable=KEY_VARIABLE)
