"""Which version of an engine a group runs, as plan and calibration name it. Asks the installation, starts no engine."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llamarack.config import Group
from llamarack.engine.installed import engine_for
from llamarack.errors import LlamarackError

_TIMEOUT_S = 30.0


def engine_version(group: Group) -> str | None:
    """`2026.10.11549` of the built-in llama.cpp, `b11434` of a llama-server, `0.25.1` of vLLM; None: not known."""
    if group.engine != "llamacpp":
        try:
            return engine_for(group, on_cards=any(group.gpu_lists() or [])).version
        except LlamarackError:
            return None
    if group.engine_binary is not None:
        return _binary_version(group.engine_binary)
    try:
        return version("xllamacpp")
    except PackageNotFoundError:
        return None


def _binary_version(binary: Path) -> str | None:
    """`llama-server --version` says `version: 11434 (abcdef)`; builds from a tree without tags say `0.6.0-dev`."""
    try:
        done = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"version: (\d{3,}) ", done.stdout + done.stderr)
    return f"b{found[1]}" if found else None
