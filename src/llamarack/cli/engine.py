"""`llamarack engine install|list`: engines in environments of their own, and which one a deployment file would use."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from llamarack import config
from llamarack.cli.console import data, people, print_json
from llamarack.config import Group
from llamarack.engine.install import install as make_ready
from llamarack.engine.install import recipe_for
from llamarack.engine.installed import Installed, engine_for, installed_engines
from llamarack.errors import LlamarackError
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.machine import Machine
from llamarack.units import format_duration

SCHEMA_VERSION = 1
app = typer.Typer(help="Make an inference engine ready, or show which ones are.", no_args_is_help=True)


@app.command("install")
def install(
    engine: Annotated[str, typer.Argument(metavar="vllm|transformers", help="The engine to make ready.")],
    version: Annotated[str | None, typer.Option(help="Another version than the one that was tested.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="The build for the processor, though there are cards.")] = False,
) -> None:
    """Make an engine ready in an environment of its own, with pip and its settings."""
    machine = detect_machine()
    recipe = recipe_for(engine, has_cards=bool(machine.cards) and not cpu, version=version)
    started = time.monotonic()
    if people.is_terminal:
        with people.status(f"installing {recipe.environment}") as shown:
            ready = make_ready(recipe, lambda line: shown.update(f"{recipe.environment}: {escape(line)}"))
    else:
        ready = make_ready(recipe, lambda line: people.print(escape(line)))
    took = format_duration(time.monotonic() - started)
    people.print(f"[bold green]ready[/]  {ready.distribution} {ready.version} ({ready.device}) after {took}")
    people.print(f"[dim]serve uses it by itself; engine_python: {ready.python} names it in a file[/]")
    print(ready.python)


@app.command("list")
def list_engines(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Show what this deployment file uses.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record instead of text.")] = False,
) -> None:
    """Show the engines that are ready, and the one that each group of a deployment file would use."""
    machine = detect_machine()
    known = [_builtin(), *installed_engines()]
    groups = _groups(file, machine, known) if file is not None else []
    if json:
        instruction_sets = list(machine.host.instruction_sets)
        record = {"schema_version": SCHEMA_VERSION, "engines": [_row(one) for one in known], "groups": groups}
        print_json(orjson.dumps(record | {"instruction_sets": instruction_sets}, option=orjson.OPT_INDENT_2))
        return
    _print(known, groups, machine)


def _builtin() -> Installed:
    """llama.cpp in this interpreter."""
    return Installed(
        engine="llamacpp",
        distribution="xllamacpp",
        version=version("xllamacpp"),
        python=Path(sys.executable),
        torch=None,
        cuda=None,
    )


def _row(engine: Installed) -> dict[str, Any]:
    return asdict(engine) | {"python": str(engine.python), "device": engine.device}


def _groups(file: Path, machine: Machine, known: list[Installed]) -> list[dict[str, Any]]:
    """Which engine every group would be started with, or why none can be."""
    rows = []
    for model in config.load(file).deployment.models:
        for group in model.groups:
            row: dict[str, Any] = {"model": model.name, "engine": group.engine, "uses": None, "problem": None}
            try:
                row["uses"] = _row(_used_by(group, machine, known))
            except LlamarackError as error:
                row["problem"] = f"{error.message}; {error.hint}" if error.hint else error.message
            rows.append(row)
    return rows


def _used_by(group: Group, machine: Machine, known: list[Installed]) -> Installed:
    if group.engine == "llamacpp":
        return known[0]
    return engine_for(group, on_cards=bool(machine.cards) and group.gpus != [], known=known)


def _print(known: list[Installed], groups: list[dict[str, Any]], machine: Machine) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("engine", "version", "package", "devices", "interpreter"):
        table.add_column(heading, overflow="fold")
    for one in known:
        table.add_row(one.engine, one.version, one.distribution, one.device, str(one.python))
    data.print(table)
    sets = ", ".join(machine.host.instruction_sets) or "none of those that engines use"
    data.print(f"\nprocessor: {escape(machine.host.processor or 'unknown')} ({sets})")
    for row in groups:
        used = row["uses"]
        what = f"{used['distribution']} {used['version']} in {used['python']}" if used else row["problem"]
        data.print(f"{row['model']}: {row['engine']}: {escape(what)}")
    if not any(one.engine == "vllm" for one in known):
        people.print("\n[dim]llamarack engine install vllm makes vLLM ready[/]")
