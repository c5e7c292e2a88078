"""`llamarack keys add|set|list|revoke|usage`: who may call the gateway, and how much."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.table import Table

from llamarack.cli.console import data, people
from llamarack.cli.serve import StateDir
from llamarack.cli.status import the_running_rack
from llamarack.cli.written import require_folder_of
from llamarack.errors import UsageError
from llamarack.gateway.keys import Key, KeyFile, new_key, read_keys, write_keys
from llamarack.gateway.quota import read_usage
from llamarack.paths import rack_paths
from llamarack.units import format_count

app = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)
File = Annotated[Path, typer.Option("--file", help="The file named by gateway.api_keys_file.")]
Name = Annotated[str, typer.Argument(help="Whose key.")]
Models = Annotated[str | None, typer.Option("--models", help="The only models it may use, with commas; all: any.")]
Parallel = Annotated[int | None, typer.Option("--max-parallel", min=0, help="Requests at once; 0: any number.")]
Minute = Annotated[int | None, typer.Option("--requests-per-minute", min=0, help="0: any number.")]
Day = Annotated[
    int | None, typer.Option("--tokens-per-day", min=0, help="Prompt and output tokens a day (UTC); 0: any number.")
]


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Who will use it.")],
    file: File = Path("keys.yaml"),
    models: Models = None,
    max_parallel: Parallel = None,
    requests_per_minute: Minute = None,
    tokens_per_day: Day = None,
) -> None:
    """Make a key, print it once, keep its SHA-256. A running gateway takes it within a second."""
    key, digest = new_key()
    try:
        entry = Key(name=name, sha256=digest, created_unix_s=int(time.time()))
    except ValidationError:
        raise UsageError(
            f"`{name}` is no name for a key: 1 to 64 letters, digits, dots, dashes and underscores",
            hint="llamarack keys add alice",
        ) from None
    entry = _limited(entry, models, max_parallel, requests_per_minute, tokens_per_day)
    with _alone(file):
        content = read_keys(file) if file.exists() else KeyFile()
        if any(key.name == name for key in content.keys):
            raise UsageError(f"there is a key for `{name}` already", hint=f"llamarack keys revoke {name} --file {file}")
        write_keys(file, KeyFile(keys=[*content.keys, entry]))
    print(key)
    people.print(f"[dim]shown once; {file} keeps its SHA-256[/]")


@app.command("set")
def set_(
    name: Name,
    file: File = Path("keys.yaml"),
    models: Models = None,
    max_parallel: Parallel = None,
    requests_per_minute: Minute = None,
    tokens_per_day: Day = None,
) -> None:
    """Change a key's limits; the key stays. A running gateway takes them within a second."""
    if models is None and max_parallel is None and requests_per_minute is None and tokens_per_day is None:
        raise UsageError("no limit was given", hint=f"llamarack keys set {name} --tokens-per-day 1000000")
    with _alone(file):
        content = read_keys(file)
        entry = _known(content, name, file)
        changed = _limited(entry, models, max_parallel, requests_per_minute, tokens_per_day)
        write_keys(file, KeyFile(keys=[changed if key.name == name else key for key in content.keys]))
    people.print(f"{name}: {_limits(changed) or 'no limits'}")


@app.command("list")
def list_(file: File = Path("keys.yaml")) -> None:
    """Print names, dates and limits, never keys."""
    for key in read_keys(file).keys:
        day = time.strftime("%Y-%m-%d", time.localtime(key.created_unix_s))
        print("\t".join([key.name, day, _limits(key)]).rstrip())


@app.command("revoke")
def revoke(name: Name, file: File = Path("keys.yaml")) -> None:
    """Take a key away. A running gateway refuses it within a second."""
    with _alone(file):
        content = read_keys(file)
        _known(content, name, file)
        write_keys(file, KeyFile(keys=[key for key in content.keys if key.name != name]))
    people.print(f"key of {name} revoked")


@app.command("usage")
def usage(
    rack: Annotated[str | None, typer.Option(help="Which rack; default: the only one that runs.")] = None,
    state_dir: StateDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record.")] = False,
) -> None:
    """What each key has used, by day (UTC). A running gateway writes it every few seconds."""
    paths = rack_paths(rack or the_running_rack(state_dir), state_dir)
    days = read_usage(paths.folder)
    if as_json:
        value = {day: {name: asdict(use) for name, use in keys.items()} for day, keys in days.items()}
        print(json.dumps({"schema_version": 1, "days": value}))
        return
    table = Table("day", "key", box=None, pad_edge=False)
    for column in ("requests", "prompt tokens", "generated tokens"):
        table.add_column(column, justify="right")
    for day, keys in days.items():
        for name, use in sorted(keys.items()):
            counts = (use.requests, use.prompt_tokens, use.generated_tokens)
            table.add_row(day, name, *(format_count(count) for count in counts))
    if days:
        data.print(table)
    else:
        people.print(f"no key has been used on rack {paths.name}")


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Two commands at once would each write what they read, and one key be lost. The folder's lock leaves no file."""
    require_folder_of(file)
    folder = os.open(file.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _known(content: KeyFile, name: str, file: Path) -> Key:
    found = next((key for key in content.keys if key.name == name), None)
    if found is None:
        known = ", ".join(key.name for key in content.keys) or "none"
        raise UsageError(f"there is no key for `{name}` in `{file}`", hint=f"keys: {known}")
    return found


def _limited(
    key: Key, models: str | None, max_parallel: int | None, requests_per_minute: int | None, tokens_per_day: int | None
) -> Key:
    """With what was given; 0 and `all` take a limit away."""
    changes: dict[str, object] = {}
    if models is not None:
        names = [name.strip() for name in models.split(",") if name.strip()]
        changes["models"] = None if names == ["all"] else names
    for name, value in (
        ("max_parallel", max_parallel),
        ("requests_per_minute", requests_per_minute),
        ("tokens_per_day", tokens_per_day),
    ):
        if value is not None:
            changes[name] = value or None
    return key.model_copy(update=changes)


def _limits(key: Key) -> str:
    words = []
    if key.models is not None:
        words.append("models " + ",".join(key.models))
    if key.max_parallel is not None:
        words.append(f"{key.max_parallel} at once")
    if key.requests_per_minute is not None:
        words.append(f"{key.requests_per_minute} requests a minute")
    if key.tokens_per_day is not None:
        words.append(f"{format_count(key.tokens_per_day)} tokens a day")
    return "; ".join(words)
