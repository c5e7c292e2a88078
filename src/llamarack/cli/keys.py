"""`llamarack keys add|list|revoke`: who may call the gateway."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from llamarack.cli.console import people
from llamarack.errors import UsageError
from llamarack.gateway.keys import Key, KeyFile, new_key, read_keys, write_keys

app = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)
File = Annotated[Path, typer.Option("--file", help="The file named by gateway.api_keys_file.")]


@app.command("add")
def add(name: Annotated[str, typer.Argument(help="Who will use it.")], file: File = Path("keys.yaml")) -> None:
    """Make a key, print it once, keep its SHA-256. A running gateway takes it within a second."""
    content = read_keys(file) if file.exists() else KeyFile()
    if any(key.name == name for key in content.keys):
        raise UsageError(f"there is a key for `{name}` already", hint=f"llamarack keys revoke {name} --file {file}")
    key, digest = new_key()
    entry = Key(name=name, sha256=digest, created_unix_s=int(time.time()))
    write_keys(file, KeyFile(keys=[*content.keys, entry]))
    print(key)
    people.print(f"[dim]shown once; {file} keeps its SHA-256[/]")


@app.command("list")
def list_(file: File = Path("keys.yaml")) -> None:
    """Print names and dates, never keys."""
    for key in read_keys(file).keys:
        print(f"{key.name}\t{time.strftime('%Y-%m-%d', time.localtime(key.created_unix_s))}")


@app.command("revoke")
def revoke(name: Annotated[str, typer.Argument(help="Whose key.")], file: File = Path("keys.yaml")) -> None:
    """Take a key away. A running gateway refuses it within a second."""
    content = read_keys(file)
    kept = [key for key in content.keys if key.name != name]
    if len(kept) == len(content.keys):
        known = ", ".join(key.name for key in content.keys) or "none"
        raise UsageError(f"there is no key for `{name}` in `{file}`", hint=f"keys: {known}")
    write_keys(file, KeyFile(keys=kept))
    people.print(f"key of {name} revoked")
