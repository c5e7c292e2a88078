"""Do the installed engines, the driver and the cards fit each other? Readers of what is installed, and the tables."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarack.hardware.machine import Card

_INSTALLED_SCRIPT = Path(__file__).parent / "data" / "installed.py"
# Lowest driver branch for a program built with this CUDA version, from NVIDIA's CUDA Toolkit release notes, table
# "CUDA Toolkit and corresponding driver versions", and the minor-version compatibility rule of CUDA 11.1 and later.
_DRIVER_FOR_CUDA = (((13, 0), 580), ((12, 0), 525), ((11, 8), 520), ((11, 1), 450))
# First CUDA version that compiles for a compute capability (CUDA Toolkit release notes, new architectures).
_CUDA_FOR_CAPABILITY = (
    ((12, 0), (12, 8)),
    ((10, 0), (12, 8)),
    ((8, 9), (11, 8)),
    ((8, 6), (11, 1)),
    ((8, 0), (11, 0)),
)
# CUDA 13 no longer compiles for Maxwell, Pascal and Volta (CUDA 13.0 release notes).
_CAPABILITY_FOR_CUDA_13 = (7, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """One engine as it is installed. `interpreter`: the program it runs in, for the fix line.

    `cuda`: version it was built for; `none`: a build for the processor; None: not known.
    `gpu_devices`: what llama.cpp itself lists; None where it was not asked.
    """

    engine: str
    version: str | None
    interpreter: str
    cuda: str | None = None
    gpu_devices: tuple[str, ...] | None = None


def installed_command(interpreter: str | None = None) -> list[str]:
    return [interpreter or sys.executable, str(_INSTALLED_SCRIPT)]


def list_devices_command(binary: Path) -> list[str]:
    return [str(binary), "--list-devices"]


def builds_of(values: dict[str, Any], interpreter: str) -> tuple[EngineBuild, ...]:
    """`values`: what `data/installed.py` printed there."""
    builds = []
    for engine, package in (("vllm", "vllm"), ("transformers", "transformers")):
        if values[package] is not None and values["torch"] is not None:
            builds.append(
                EngineBuild(engine=engine, version=values[package], interpreter=interpreter, cuda=values["torch_cuda"])
            )
    if values["xllamacpp"] is not None:
        builds.append(
            EngineBuild(
                engine="llamacpp",
                version=values["xllamacpp"],
                interpreter=interpreter,
                gpu_devices=tuple(values["llama_devices"]),
            )
        )
    return tuple(builds)


def binary_build(listing: str, binary: str) -> EngineBuild:
    """`listing`: what `llama-server --list-devices` printed: `  CUDA0: NVIDIA H200 (143771 MiB, 143157 MiB free)`."""
    names = re.findall(r"^\s+(\w+): ", listing, re.MULTILINE)
    devices = tuple(name for name in names if not name.startswith("CPU"))
    return EngineBuild(engine="llamacpp", version=None, interpreter=binary, gpu_devices=devices)


def driver_needed(cuda: str) -> int | None:
    """Lowest driver branch for a build of this CUDA version; None for versions older than the table."""
    version = _pair(cuda)
    return next((driver for first, driver in _DRIVER_FOR_CUDA if version >= first), None)


def driver_branch(version: str) -> int:
    return int(version.partition(".")[0])


def cuda_needed(card: Card) -> tuple[int, int] | None:
    """First CUDA version that knows this card."""
    if card.compute_capability is None:
        return None
    return next((cuda for first, cuda in _CUDA_FOR_CAPABILITY if card.compute_capability >= first), None)


def is_known_to(cuda: str, card: Card) -> bool:
    """Whether a build of this CUDA version can hold code for the card."""
    needed, version = cuda_needed(card), _pair(cuda)
    if needed is not None and version < needed:
        return False
    return version < (13, 0) or card.compute_capability is None or card.compute_capability >= _CAPABILITY_FOR_CUDA_13


def _pair(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)
