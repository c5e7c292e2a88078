"""One folder that holds everything a server without a network needs, and the installer that checks it.

install.sh          finds a Python and runs install.pyz; nothing else is needed
install.pyz         verify, install, accept, undo, uninstall (ship/installer)
bundle.json         what is in it and for which Python and platform
SHA256SUMS          of every other file, as `sha256sum -c` reads it
wheels/             for all environments together
llamarack.txt, engine-NAME.txt    what each environment gets, pinned by hash
models/             the demo model and those that were named
Containerfile       an image from this folder, without a network
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from llamarack.engine.install import Recipe
from llamarack.errors import HardwareError, UsageError
from llamarack.ship.installer import program
from llamarack.ship.installer.contents import SUMS, sha256_of
from llamarack.ship.own_wheel import own_wheel
from llamarack.ship.target import Target
from llamarack.ship.wheelhouse import Wheel, collect, lock_text
from llamarack.units import format_bytes
from llamarack.version import __version__

SCHEMA_VERSION = 1
_APP_LOCK = "llamarack.txt"
_DATA = Path(__file__).parent / "data"
_COPY_BYTES = 4 * 1024**2
_PARTS = ("wheels", "models")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What goes into a bundle. `models`: files or folders, by their last name."""

    target: Target
    recipes: Sequence[Recipe]
    models: Sequence[Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """`digest`: SHA-256 of SHA256SUMS; whoever compares it on the server knows that every byte is the same."""

    folder: Path
    digest: str
    files: int
    size_bytes: int


def make_bundle(folder: Path, wanted: Wanted, tell: Callable[[str], None]) -> Bundle:
    """Fills `folder`, which must be new or empty; on failure it is left as it was found.

    Raises UsageError for a folder in use, a model that is not there, or what pip said; HardwareError for a full disk.
    """
    _require_unused(folder)
    models = _by_name(wanted.models)
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{folder.name}-") as scratch:
        _require_room(parent, sum(map(_size_bytes, models.values())))
        staged = Path(scratch) / "bundle"
        for part in _PARTS:
            (staged / part).mkdir(parents=True)
        environments = _wheels(staged, Path(scratch), wanted, tell)
        for name, source in models.items():
            tell(f"copying {name} ({format_bytes(_size_bytes(source))})")
            _copy(source, staged / "models" / name)
        write_fixed_files(staged)
        (staged / "bundle.json").write_bytes(_record(wanted, environments, list(models)))
        tell("hashing")
        digest, files, size = write_sums(staged)
        _make_readable(staged)
        if folder.exists():
            folder.rmdir()
        os.rename(staged, folder)
    return Bundle(folder=folder, digest=digest, files=files, size_bytes=size)


def _wheels(staged: Path, scratch: Path, wanted: Wanted, tell: Callable[[str], None]) -> dict[str, list[Wheel]]:
    """Lock files and wheels of each environment; returns them by the lock's name."""
    ours = scratch / "ours"
    ours.mkdir()
    tell("building llamarack's own wheel")
    own = own_wheel(ours, scratch / "build")
    requirements: dict[str, tuple[list[str], tuple[str, ...]]] = {_APP_LOCK: ([str(own), "pip"], ())}
    for recipe in wanted.recipes:
        # pip as well: it is how one looks into an environment, and how it is mended.
        requirements[_lock_name(recipe)] = ([*recipe.requirements, "pip"], recipe.removed)
    found = {}
    for lock, (names, removed) in requirements.items():
        place = scratch / lock
        place.mkdir()
        found[lock] = collect(names, wanted.target, place, without=removed, tell=tell)
        (staged / lock).write_text(lock_text(found[lock]))
        for wheel in found[lock]:
            os.replace(wheel.path, staged / "wheels" / wheel.path.name)
        shutil.rmtree(place)
    return found


def _lock_name(recipe: Recipe) -> str:
    return f"engine-{recipe.environment}.txt"


def _record(wanted: Wanted, environments: dict[str, list[Wheel]], models: Sequence[str]) -> bytes:
    def environment(lock: str) -> dict[str, Any]:
        return {"lock": lock, "unpacked_bytes": sum(wheel.unpacked_bytes for wheel in environments[lock])}

    value = {
        "schema_version": SCHEMA_VERSION,
        "llamarack": __version__,
        "made_unix_s": int(time.time()),
        "python": wanted.target.python,
        "machine": wanted.target.machine,
        "glibc": f"2.{wanted.target.glibc_minor}",
        "app": environment(_APP_LOCK),
        "engines": [
            {**environment(_lock_name(recipe)), "name": recipe.environment, "recipe": asdict(recipe)}
            for recipe in wanted.recipes
        ],
        "models": list(models),
    }
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def write_fixed_files(staged: Path) -> None:
    """The installer, and the recipe of an image."""
    program.write(staged / program.FILE)
    for name in ("install.sh", "Containerfile"):
        shutil.copyfile(_DATA / name, staged / name)


def containerfile_text() -> str:
    return (_DATA / "Containerfile").read_text()


def write_sums(staged: Path) -> tuple[str, int, int]:
    """SHA256SUMS over all files; its own SHA-256, and the number and size of what it lists."""
    lines, size = [], 0
    for path in sorted(path for path in staged.rglob("*") if path.is_file()):
        lines.append(f"{sha256_of(path)}  {path.relative_to(staged)}\n")
        size += path.stat().st_size
    text = "".join(lines).encode()
    (staged / SUMS).write_bytes(text)
    return hashlib.sha256(text).hexdigest(), len(lines), size


def _make_readable(staged: Path) -> None:
    """Whoever installs it need not be the one who made it."""
    for path in [staged, *staged.rglob("*")]:
        path.chmod(0o755 if path.is_dir() or path.name == "install.sh" else 0o644)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        # Links are followed: downloads of Hugging Face models are links into a cache.
        shutil.copytree(source, target, symlinks=False, ignore=shutil.ignore_patterns(".git", ".cache"))
        return
    with open(source, "rb") as reader, open(target, "wb") as writer:
        shutil.copyfileobj(reader, writer, _COPY_BYTES)


def _require_unused(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise UsageError(f"`-o {folder}` is there already and not an empty folder", hint=f"-o {folder}-2")


def _by_name(models: Sequence[Path]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for path in models:
        if not path.exists():
            raise UsageError(f"`--model {path}` is not there", hint=f"ls {path.absolute().parent}")
        name = path.absolute().name
        if "\n" in name or name.startswith("."):
            raise UsageError(f"`--model {path}`: a name that starts with a dot or holds a line break", hint="rename it")
        if name in named:
            raise UsageError(
                f"`--model {path}` and `--model {named[name]}` have the same last name", hint="rename one of them"
            )
        named[name] = path
    return named


def _size_bytes(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size


def _require_room(parent: Path, models_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < models_bytes:
        raise HardwareError(
            f"`{parent}` has {format_bytes(free)} free, the models alone take {format_bytes(models_bytes)}",
            hint="-o names a folder on another disk",
        )
