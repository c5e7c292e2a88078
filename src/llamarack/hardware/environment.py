"""What surrounds the engines: variables, device nodes, limits, who else is here. Reads; judges nothing.

Run as a program it prints the record as JSON. `root` is put before every path, so recorded trees are read like a
live machine.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# Variables that change which cards an engine sees or how cards talk; nothing else of the environment is kept.
_VARIABLES = re.compile(r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NVIDIA_VISIBLE_DEVICES|NCCL_\w+|GGML_CUDA_\w+")
# Programs that hold cards or serve models, by process name or first words of the command line.
_ENGINES = {
    "vllm": re.compile(r"(^|/)vllm( |$)|-m vllm\.|VLLM::"),
    "llama.cpp": re.compile(r"(^|/)llama-(server|cli|bench)( |$)"),
    "ollama": re.compile(r"(^|/)ollama( |$)"),
    "sglang": re.compile(r"-m sglang|(^|/)sglang( |$)|sglang::"),
    "text-generation-inference": re.compile(r"(^|/)text-generation-(launcher|server|router)( |$)"),
    "triton": re.compile(r"(^|/)tritonserver( |$)"),
    "xinference": re.compile(r"(^|/)xinference(-local|-worker|-supervisor)?( |$)"),
    "localai": re.compile(r"(^|/)local-ai( |$)"),
    "lm studio": re.compile(r"(^|/)lm-?studio( |$)", re.IGNORECASE),
}
_INTERPRETERS = re.compile(r"(^|/)(python[0-9.]*|bash|sh)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    pid: int
    engine: str
    user: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """None is "not known"; a limit that is not set is `inf`."""

    variables: Mapping[str, str]
    device_nodes: Mapping[str, str]  # name under /dev -> `ok`, `missing`, `denied` (device cgroup), `no permission`
    in_container: bool
    nvswitch_present: bool
    fabric_manager_running: bool
    shm_total_bytes: int | None
    memlock_bytes: float
    memlock_hard_bytes: float
    open_files: float
    open_files_hard: float
    iommu_translates: bool | None
    numa_nodes_usable: tuple[int, ...]
    engines: tuple[RunningEngine, ...]


def read_environment(
    root: Path = Path("/"), variables: Mapping[str, str] = os.environ, *, affinity: frozenset[int] | None = None
) -> Environment:
    """`affinity`: cores this process may run on; default: asked from the kernel."""
    commands = _commands(root)
    memlock, memlock_hard = _limits(resource.RLIMIT_MEMLOCK)
    files, files_hard = _limits(resource.RLIMIT_NOFILE)
    return Environment(
        variables={name: value for name, value in sorted(variables.items()) if _VARIABLES.fullmatch(name)},
        device_nodes=read_device_nodes(root),
        in_container=_in_container(root),
        nvswitch_present=any((root / "dev").glob("nvidia-nvswitch[0-9]*")) or _has_nvswitch(root),
        fabric_manager_running=any("nv-fabricmanager" in command for command in commands.values()),
        shm_total_bytes=_shm_bytes(root),
        memlock_bytes=memlock,
        memlock_hard_bytes=memlock_hard,
        open_files=files,
        open_files_hard=files_hard,
        iommu_translates=_iommu_translates(root),
        numa_nodes_usable=_numa_nodes(root, affinity or frozenset(os.sched_getaffinity(0))),
        engines=_running_engines(commands),
    )


def from_json(values: dict[str, Any]) -> Environment:
    engines = tuple(RunningEngine(**engine) for engine in values["engines"])
    return Environment(**(values | {"engines": engines, "numa_nodes_usable": tuple(values["numa_nodes_usable"])}))


def read_device_nodes(root: Path) -> dict[str, str]:
    """The nodes CUDA opens: one per card the driver names, the control node and the memory manager's."""
    folders = list((root / "proc/driver/nvidia/gpus").glob("*/information"))
    minors = sorted(int(match[1]) for path in folders if (match := re.search(r"Device Minor:\s*(\d+)", _text(path))))
    if not folders and not (root / "proc/driver/nvidia/version").exists() and not (root / "dev/nvidiactl").exists():
        return {}
    names = [*(f"nvidia{minor}" for minor in minors), "nvidiactl", "nvidia-uvm"]
    return {name: _node_state(root / "dev" / name) for name in names}


def _node_state(path: Path) -> str:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        # The device cgroup answers EPERM whatever the file's mode; that is how a container loses its cards.
        return {errno.ENOENT: "missing", errno.EPERM: "denied", errno.EACCES: "no permission"}.get(
            error.errno or 0, error.strerror or "unreadable"
        )
    return "ok"


def _in_container(root: Path) -> bool:
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    return bool(re.search(r"docker|kubepods|containerd|lxc|libpod", _text(root / "proc/1/cgroup")))


def _has_nvswitch(root: Path) -> bool:
    """NVSwitch: NVIDIA's vendor id with PCI class 0x0680, other bridge."""
    return any(
        _text(folder / "vendor") == "0x10de" and _text(folder / "class").startswith("0x0680")
        for folder in (root / "sys/bus/pci/devices").glob("*")
    )


def _shm_bytes(root: Path) -> int | None:
    try:
        return shutil.disk_usage(root / "dev/shm").total
    except OSError:
        return None


def _limits(which: int) -> tuple[float, float]:
    soft, hard = (float("inf") if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which))
    return soft, hard


def _iommu_translates(root: Path) -> bool | None:
    """True where a display or accelerator card sits in a translating group; None where the kernel does not tell."""
    found = []
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        if _text(folder / "class").startswith(("0x03", "0x12")) and (folder / "iommu_group").exists():
            found.append(_text(folder / "iommu_group/type"))
    return any(kind.startswith("DMA") for kind in found) if found else None


def _numa_nodes(root: Path, affinity: frozenset[int]) -> tuple[int, ...]:
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if affinity & _cpu_list(_text(folder / "cpulist")):
            nodes.append(int(folder.name.removeprefix("node")))
    return tuple(sorted(nodes))


def _cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` as the kernel writes it."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _commands(root: Path) -> dict[int, str]:
    """Command line of every process visible here, or its name where it has none."""
    commands = {}
    for folder in (root / "proc").glob("[0-9]*"):
        words = _text(folder / "cmdline").replace("\0", " ").strip()
        commands[int(folder.name)] = words or _text(folder / "comm")
    return commands


def _running_engines(commands: Mapping[int, str]) -> tuple[RunningEngine, ...]:
    """One entry per engine and process; only the program and its first arguments count, not file names later on."""
    found = []
    for pid, command in sorted(commands.items()):
        first, _, rest = command.partition(" ")
        head = " ".join(rest.split()[:2]) if _INTERPRETERS.search(first) else first
        engine = next((name for name, pattern in _ENGINES.items() if pattern.search(head)), None)
        if engine is not None:
            found.append(RunningEngine(pid=pid, engine=engine, user=_user(pid)))
    return tuple(found)


def _user(pid: int) -> str | None:
    try:
        return psutil.Process(pid).username()
    except psutil.Error:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    json.dump(dataclasses.asdict(read_environment()), sys.stdout)
