"""`llamarack serve FILE|MODEL`: a rack in the foreground, or detached."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamarack.cli.serving import serve_target
from llamarack.logs import LogFormat

Rack = Annotated[str | None, typer.Option("--rack", help="Name of the rack; default: the file's stem.")]
StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Folder for state and sockets.")]


def serve(
    target: Annotated[
        Path, typer.Argument(metavar="FILE|MODEL", help="A deployment file, or a model to serve as it is.")
    ],
    host: Annotated[str | None, typer.Option(help="Overrides gateway.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides gateway.port.")] = None,
    rack: Rack = None,
    state_dir: StateDir = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it is ready; it runs on in the background.")
    ] = False,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Of events and the gateway's log; default: LLAMARACK_LOG_FORMAT or text.")
    ] = None,
) -> None:
    """Serve the models of a deployment file, or one model. Behind one OpenAI-compatible endpoint."""
    raise typer.Exit(
        serve_target(target, host=host, port=port, rack=rack, state_dir=state_dir, detach=detach, log_format=log_format)
    )
