"""`llamarack support -o FILE.tar.gz`: what a report of a fault needs, in one archive without secrets and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from llamarack.cli.console import people
from llamarack.cli.serve import StateDir
from llamarack.errors import UsageError
from llamarack.paths import rack_paths
from llamarack.paths import state_dir as state_folder
from llamarack.ship.support import Asked, write_support


def support(
    output: Annotated[Path, typer.Option("-o", "--output", help="The archive to write, such as support.tar.gz.")],
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The deployment file in question.")] = None,
    rack: Annotated[str | None, typer.Option(help="Only this rack; default: all of this user.")] = None,
    mask_names: Annotated[bool, typer.Option("--mask-names", help="Mask user, host and home folder as well.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Collect what helps to find a fault, masked. Check, plan, status, journal, log tails and versions, without keys,
    tokens and prompts."""
    if file is not None and not file.is_file():
        raise UsageError(f"`{file}` is not a file", hint="llamarack support -o support.tar.gz rack.yaml")
    folder = state_folder(state_dir) / "racks"
    known = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if rack is not None and rack not in known:
        raise UsageError(f"`--rack {rack}`: no such rack in `{folder}`", hint=f"--rack {known[0]}" if known else None)
    asked = Asked(
        file=file,
        racks=tuple(rack_paths(name, state_dir) for name in ([rack] if rack else known)),
        is_masking_names=mask_names,
    )
    mask = write_support(output, asked, lambda text: people.print(f"[dim]{escape(text)}[/]"))
    masked = ", ".join(f"{count} {kind}" for kind, count in sorted(mask.counts.items()))
    people.print(f"[bold green]written[/]  masked: {masked or 'nothing'}")
    people.print("[dim]it is text; look through it before you hand it on[/]")
    print(output)
