"""One archive of what a report of a fault needs, without secrets and prompts, for carrying out of the site.

Every part is collected by itself and within its time; one that fails is named in the manifest and does not end the
rest. What was masked is counted there. Keys, key files, certificates and models are never read into it.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import io
import os
import platform
import re
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml

from llamarack.errors import ConfigError, LlamarackError, UsageError
from llamarack.paths import RackPaths, faults_dir, install_folder
from llamarack.ship.mask import Mask, is_secret_name, is_secret_option
from llamarack.version import __version__
from llamarack.yaml_text import parse_yaml, read_text

SCHEMA_VERSION = 1
_COMMAND_TIMEOUT_S = 90.0
_TAIL_BYTES = 256 * 1024
# Whose values tell something about a fault; of all others only the names are kept.
_TELLING = re.compile(
    r"^(?:CUDA|NCCL|NVIDIA|VLLM|TORCH|PYTORCH|OMP|MKL|GGML|LLAMA|LLAMARACK|HF|PIP|XDG)_|_proxy$", re.I
)
_TELLING_NAMES = {"PATH", "LANG", "LC_ALL", "TZ", "PWD", "VIRTUAL_ENV", "PYTHONPATH", "NOTIFY_SOCKET"}
_USER_IN_URL = re.compile(r"://([^\s/@]+)@")
_README = """\
Made by `llamarack support`. manifest.json lists what is here, what could not be collected and how often something was
masked. Lines of logs whose shape is not known, and texts quoted in the others, were replaced by their length: they may
be prompts. Look through it before you hand it on; it is text.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`file`: a deployment file; `racks`: whose state and logs to take; `is_masking_names`: users, hosts, folders."""

    file: Path | None
    racks: tuple[RackPaths, ...]
    is_masking_names: bool


@dataclass(slots=True, kw_only=True)
class Collected:
    """`parts`: by name in the archive, masked. `missing`: why a part is not there."""

    parts: dict[str, bytes] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def write_support(path: Path, asked: Asked, tell: Callable[[str], None]) -> Mask:
    """Writes the archive, mode 0600. Raises UsageError for a file that is there already or cannot be written."""
    mask = Mask(known_secrets(asked, os.environ), names=_names() if asked.is_masking_names else None)
    collected = collect(asked, mask, tell)
    collected.parts["manifest.json"] = _json(
        {
            "schema_version": SCHEMA_VERSION,
            "made_unix_s": int(time.time()),
            "llamarack": __version__,
            "parts": {name: len(data) for name, data in sorted(collected.parts.items())},
            "not_collected": collected.missing,
            "masked": dict(mask.counts),
        }
    )
    collected.parts["README.txt"] = _README.encode()
    _require_clean(collected.parts, mask)
    is_ours = False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        is_ours = True
        with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, data in sorted(collected.parts.items()):
                entry = tarfile.TarInfo(f"llamarack-support/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(data))
    except FileExistsError:
        raise UsageError(f"`-o {path}` is there already", hint=f"-o {path.with_name('2-' + path.name)}") from None
    except OSError as error:
        if is_ours:
            path.unlink(missing_ok=True)  # half an archive, in the way of the next
        raise UsageError(f"`-o {path}` cannot be written: {error.strerror}", hint="-o /tmp/support.tar.gz") from error
    return mask


def collect(asked: Asked, mask: Mask, tell: Callable[[str], None]) -> Collected:
    found = Collected()
    file = [str(asked.file)] if asked.file else []
    for name, words in (
        ("check.json", ["check", "--no-functional", "--json", *file]),
        ("engines.json", ["engine", "list", "--json", *file]),
        *([("plan.json", ["plan", "--json", *file])] if file else []),
        *((f"racks/{rack.name}/status.json", _status_words(rack)) for rack in asked.racks),
    ):
        tell(f"llamarack {words[0]}")
        with _part(found, mask, name):
            found.parts[name] = _json(mask.value(_ask(words)))
        if name in found.missing and file and words[-1] == file[0] and words[0] != "plan":
            # A file that is wrong must not hide the machine.
            found.missing[f"{name} of the file"] = found.missing.pop(name)
            with _part(found, mask, name):
                found.parts[name] = _json(mask.value(_ask(words[:-1])))
    with _part(found, mask, "versions.json"):
        found.parts["versions.json"] = _json(mask.value(_versions()))
    with _part(found, mask, "environment.json"):
        found.parts["environment.json"] = _json(_environment(mask, os.environ))
    if asked.file is not None:
        with _part(found, mask, "deployment.yaml"):
            found.parts["deployment.yaml"] = _deployment(asked.file, mask)
    for path in sorted(faults_dir().glob("*.json")):
        with _part(found, mask, f"faults/{path.name}"):
            found.parts[f"faults/{path.name}"] = _json(mask.value(orjson.loads(path.read_bytes())))
    for rack in asked.racks:
        tell(f"state and logs of rack {rack.name}")
        _collect_rack(found, rack, mask)
    return found


def known_secrets(asked: Asked, environment: Mapping[str, str]) -> set[str]:
    """Values that are secret by where they stand, so that they are found wherever else they turn up."""
    secrets = {value for name, value in environment.items() if is_secret_name(name)}
    for value in environment.values():
        secrets |= {part for user in _USER_IN_URL.findall(value) for part in (user, user.partition(":")[2])}
    for rack in asked.racks:
        with contextlib.suppress(OSError, ValueError):
            secrets |= set(_under_secret_names(orjson.loads(rack.state.read_bytes())))
        for line in (line for path in _journals(rack) if path.exists() for line in _tail(path)):
            with contextlib.suppress(ValueError):
                secrets |= set(_under_secret_names(orjson.loads(line)))
    if asked.file is not None:
        with contextlib.suppress(ConfigError):
            value = parse_yaml(read_text(asked.file, "file"), str(asked.file)).value
            secrets |= set(_under_secret_names(value))
            secrets |= {text for text in _of_env(value) if not text.startswith("/") and not text.isdigit()}
    # A path may be named like a secret (`API_KEY_FILE`); what it names is not read into the archive anyway.
    return {value for value in secrets if not value.startswith("/")}


def _under_secret_names(value: Any, name: str = "") -> Iterator[str]:
    match value:
        case dict():
            for key, each in value.items():
                yield from _under_secret_names(each, str(key))
        case list():
            for before, each in zip(["", *value], value, strict=False):
                is_value = is_secret_option(before) and isinstance(each, str)
                yield from [each] if is_value else _under_secret_names(each, name)
        case str() if is_secret_name(name):
            yield value


def _of_env(value: Any) -> Iterator[str]:
    """Every value of an `env` mapping of the deployment file."""
    match value:
        case dict():
            for key, each in value.items():
                if key == "env" and isinstance(each, dict):
                    yield from map(str, each.values())
                else:
                    yield from _of_env(each)
        case list():
            for each in value:
                yield from _of_env(each)


def _collect_rack(found: Collected, rack: RackPaths, mask: Mask) -> None:
    place = f"racks/{rack.name}"
    if rack.state.exists():
        with _part(found, mask, f"{place}/state.json"):
            found.parts[f"{place}/state.json"] = _json(mask.value(orjson.loads(rack.state.read_bytes())))
    for path in _journals(rack):
        if path.exists():
            with _part(found, mask, f"{place}/{path.name}"):
                found.parts[f"{place}/{path.name}"] = b"".join(_journal_line(line, mask) for line in _tail(path))
    for path in sorted(rack.logs.glob("*.log*")):
        with _part(found, mask, f"{place}/logs/{path.name}"):
            text = "\n".join(line.decode(errors="replace") for line in _tail(path))
            found.parts[f"{place}/logs/{path.name}"] = mask.log(text).encode()


def _journals(rack: RackPaths) -> tuple[Path, Path]:
    return rack.events.with_name(rack.events.name + ".1"), rack.events


def _journal_line(line: bytes, mask: Mask) -> bytes:
    try:
        return orjson.dumps(mask.value(orjson.loads(line)), option=orjson.OPT_APPEND_NEWLINE)
    except ValueError:  # a line that a crash cut off
        return mask.log(line.decode(errors="replace")).encode()


def _tail(path: Path) -> list[bytes]:
    """Whole lines of the last part of a file."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().splitlines()
    return lines[1:] if size > _TAIL_BYTES else lines


def _deployment(path: Path, mask: Mask) -> bytes:
    """The file without comments (they may say anything), the values of `env` and what stands under secrets' names."""
    value = parse_yaml(read_text(path, "file"), str(path)).value
    return yaml.safe_dump(mask.value(_without_env(value)), sort_keys=False, allow_unicode=True).encode()


def _without_env(value: Any) -> Any:
    match value:
        case dict():
            return {
                key: dict.fromkeys(each, "<masked env>")
                if key == "env" and isinstance(each, dict)
                else _without_env(each)
                for key, each in value.items()
            }
        case list():
            return [_without_env(each) for each in value]
    return value


def _ask(words: list[str]) -> Any:
    """The record of one of our own commands; its exit code is part of what it tells, so it does not matter here."""
    command = [sys.executable, "-P", "-m", "llamarack", *words]
    done = subprocess.run(command, capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    try:
        return orjson.loads(done.stdout)
    except ValueError:
        raise RuntimeError(done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}") from None


def _status_words(rack: RackPaths) -> list[str]:
    return ["status", "--rack", rack.name, "--state-dir", str(rack.folder.parent.parent), "--json"]


def _versions() -> dict[str, Any]:
    packages = {each.name: each.version for each in importlib.metadata.distributions()}
    installed = install_folder()
    return {
        "llamarack": __version__,
        "python": sys.version,
        "interpreter": sys.executable,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "offline_install": str(installed) if installed else None,
        "packages": dict(sorted(packages.items())),
    }


def _environment(mask: Mask, environment: Mapping[str, str]) -> dict[str, str | None]:
    """Null where the value was left out because it tells nothing about a fault."""
    told: dict[str, str | None] = {}
    for name, value in sorted(environment.items()):
        is_telling = bool(_TELLING.search(name)) or name in _TELLING_NAMES
        told[mask.text(name)] = mask.value(value, name=name) if is_telling else None
    return told


def _names() -> dict[str, str]:
    names = {str(Path.home()): "<home>", socket.gethostname(): "<host>"}
    with contextlib.suppress(KeyError, OSError):
        names[getpass.getuser()] = "<user>"
    return {name: shown for name, shown in names.items() if len(name) > 1}


@contextlib.contextmanager
def _part(found: Collected, mask: Mask, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError, yaml.YAMLError, LlamarackError) as error:
        # What others say may hold anything; what our own commands say is masked like the rest.
        found.missing[name] = (
            mask.value(str(error).splitlines()[0]) if isinstance(error, RuntimeError) else type(error).__name__
        )


def _require_clean(parts: Mapping[str, bytes], mask: Mask) -> None:
    """The last guard: an archive that holds a known secret is not written. Raises LlamarackError, our own fault."""
    for name, data in parts.items():
        text = data.decode(errors="replace")
        if any(secret in text for secret in mask.secrets):
            raise LlamarackError(f"`{name}` still held a secret after masking; nothing was written", hint=None)


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)
