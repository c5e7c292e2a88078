"""`llamarack engine install|list`: engines in environments of their own, and which one a deployment file would use."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
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
from llamarack.engine.install_llamacpp import install_llamacpp
from llamarack.engine.installed import Installed, engine_for, installed_engines
from llamarack.engine.llamacpp import binary_of, builtin_instruction_sets
from llamarack.errors import LlamarackError, UsageError
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.machine import Machine
from llamarack.units import format_duration

SCHEMA_VERSION = 1
_VERSION = re.compile(r"\d[0-9A-Za-z.+!-]{0,63}")  # PEP 440, and nothing that pip would read as more
app = typer.Typer(help="Make an inference engine ready, or show which ones are.", no_args_is_help=True)


@app.command("install")
def install(
    engine: Annotated[str, typer.Argument(metavar="llamacpp|vllm|transformers", help="The engine to make ready.")],
    version: Annotated[str | None, typer.Option(help="Another version than the one that was tested.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="The build for the processor, though there are cards.")] = False,
    cuda: Annotated[
        bool, typer.Option("--cuda", help="llamacpp: compiled for this machine's cards. Default where there are any.")
    ] = False,
    native: Annotated[
        bool, typer.Option("--native/--portable", help="llamacpp: for this very processor, or for any with AVX2.")
    ] = True,
    rpc: Annotated[
        bool, typer.Option("--rpc", help="llamacpp: with RPC devices, and the server that offers them.")
    ] = False,
) -> None:
    """Make an engine ready in an environment of its own. With pip and its settings."""
    if version is not None and not _VERSION.fullmatch(version):
        raise UsageError(f"`--version {version}` is not a version number", hint="--version 0.33.0")
    machine = detect_machine()
    if cuda and cpu:
        raise UsageError("--cuda and --cpu contradict each other", hint="leave one out")
    on_cards = cuda or (bool(machine.cards) and not cpu)
    if engine != "llamacpp" and (cuda or rpc or not native):
        raise UsageError(f"--cuda, --portable and --rpc are of llamacpp, not of {engine}", hint="leave them out")

    def make(tell: Callable[[str], None]) -> Installed:
        if engine == "llamacpp":
            return install_llamacpp(machine, tell, cuda=on_cards, native=native, rpc=rpc, version=version)
        return make_ready(recipe_for(engine, has_cards=on_cards, version=version), tell)

    started = time.monotonic()
    if people.is_terminal:
        with people.status(f"installing {engine}") as shown:
            ready = make(lambda line: shown.update(f"{engine}: {escape(line)}"))
    else:
        ready = make(_steps())
    took = format_duration(time.monotonic() - started)
    people.print(f"[bold green]ready[/]  {ready.distribution} {ready.version} ({_kind(ready)}) after {took}")
    people.print(f"[dim]serve uses it by itself; {_file_key(ready)} names it in a file[/]")
    print(ready.binary or ready.python)


def _steps() -> Callable[[str], None]:
    """For a log: every step, but of a long compilation one line a tenth."""
    told: set[str] = set()

    def tell(line: str) -> None:
        progress = re.match(r"compiling (\d+)%", line)
        if progress is not None:
            tenth = f"compiling, {int(progress[1]) // 10}0 % done"
            if tenth in told:
                return
            told.add(tenth)
            line = tenth
        people.print(escape(line), soft_wrap=True)

    return tell


def _kind(engine: Installed) -> str:
    return ", ".join([engine.device, *engine.features, *_widest(engine.instruction_sets)])


def _widest(sets: Sequence[str]) -> list[str]:
    """Those worth a word: what AVX2 brings along goes without saying."""
    return [name for name in sets if name not in {"AVX", "FMA", "F16C", "BMI2", "ARM_FMA"}]


def _file_key(engine: Installed) -> str:
    return f"engine_binary: {engine.binary}" if engine.binary else f"engine_python: {engine.python}"


@app.command("list")
def list_engines(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Show what this deployment file uses.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record instead of text.")] = False,
) -> None:
    """Show the engines that are ready. With a deployment file, the one that each of its groups would use."""
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
        instruction_sets=builtin_instruction_sets(),
    )


def _row(engine: Installed) -> dict[str, Any]:
    binary = None if engine.binary is None else str(engine.binary)
    return asdict(engine) | {"python": str(engine.python), "binary": binary, "device": engine.device}


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
    on_cards = bool(machine.cards) and group.gpus != []
    if group.engine != "llamacpp":
        return engine_for(group, on_cards=on_cards, known=known)
    binary = binary_of(group, on_cards=on_cards, known=known)
    if binary is None:
        return known[0]
    ready = next((one for one in known if one.binary == binary.path), None)
    return ready or Installed(
        engine="llamacpp",
        distribution="llama-server",
        version=f"b{binary.build}" if binary.build else "of an unknown build",
        python=binary.path,
        torch=None,
        cuda=None,
        binary=binary.path,
        features=("rpc",) if binary.has_rpc else (),
    )


def _print(known: list[Installed], groups: list[dict[str, Any]], machine: Machine) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("engine", "version", "package", "devices", "built for", "where"):
        table.add_column(heading, overflow="fold")
    for one in known:
        built_for = ", ".join([*one.features, *_widest(one.instruction_sets)])
        table.add_row(one.engine, one.version, one.distribution, one.device, built_for, str(one.binary or one.python))
    data.print(table)
    sets = ", ".join(machine.host.instruction_sets) or "none of those that engines use"
    data.print(f"\nprocessor: {escape(machine.host.processor or 'unknown')} ({sets})")
    for row in groups:
        used = row["uses"]
        what = (
            f"{used['distribution']} {used['version']} in {used['binary'] or used['python']}"
            if used
            else row["problem"]
        )
        data.print(f"{row['model']}: {row['engine']}: {escape(what)}")
    if not any(one.engine == "vllm" for one in known):
        people.print("\n[dim]llamarack engine install vllm makes vLLM ready[/]")
