"""What processor and memory may this process use? Read from /proc, /sys and the cgroup; changes nothing.

`root` is put before every path, so recorded trees are read the same way as a live machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llamarack.hardware.machine import Host

# The kernel's names in /proc/cpuinfo, as llama.cpp and vLLM look for them.
_INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512bw", "avx512_vbmi", "avx512_vnni", "avx512_bf16"),
    *("amx_int8", "amx_bf16", "amx_tile"),
)
# A v1 memory limit at or above this means "no limit": the kernel stores LONG_MAX rounded down to a page.
_V1_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """The tightest limit on the way from this process's cgroup to the mount; None is "no limit"."""

    cores: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None  # of the limiting group, without page cache that can be dropped


def read_host(root: Path = Path("/"), *, affinity_cores: int | None = None) -> Host:
    """`affinity_cores`: cores in this process's mask; default: asked from the kernel.

    Raises OSError where /proc/meminfo cannot be read.
    """
    cores = affinity_cores or len(os.sched_getaffinity(0))
    limits = read_cgroup_limits(root)
    if limits.cores is not None:
        cores = min(cores, int(limits.cores))
    total, available = _memory(root)
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
        available = min(available, max(0, limits.memory_bytes - (limits.memory_used_bytes or 0)))
    processor, flags = _cpuinfo(root)
    return Host(
        processor=processor,
        cores_usable=max(1, cores),
        instruction_sets=tuple(name for name in _INSTRUCTION_SETS if name in flags),
        memory_total_bytes=total,
        memory_available_bytes=available,
        numa_nodes=max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
        kernel=_text(root / "proc/sys/kernel/osrelease"),
    )


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    cores = [found for folder in _cgroup_folders(root, "cpu") if (found := _cores(folder)) is not None]
    limits = (_memory_limit(folder) for folder in _cgroup_folders(root, "memory"))
    tightest = min((limit for limit in limits if limit is not None), default=None)
    return CgroupLimits(
        cores=min(cores, default=None),
        memory_bytes=tightest[0] if tightest else None,
        memory_used_bytes=tightest[1] if tightest else None,
    )


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and its parents as far as they are mounted here, v2 first, then v1 (hybrids have both)."""
    groups: dict[str, str] = {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            inside = groups.get("")
        elif kind == "cgroup" and controller in options.split(","):
            inside = groups.get(controller)
        else:
            continue
        mount_root, mount_point = before.split(" ")[3:5]
        if inside is not None:
            yield from _mounted_parents(root / mount_point.lstrip("/"), mount_root, inside)


def _mounted_parents(mount: Path, mount_root: str, path: str) -> Iterator[Path]:
    # In a container without its own cgroup namespace the path names the host's tree, of which only the part
    # below `mount_root` is mounted; with one, the path may climb out by `/..` and then the mount is all there is.
    inside = Path(path).relative_to(mount_root) if Path(path).is_relative_to(mount_root) else Path(path.lstrip("/"))
    if ".." in inside.parts:
        inside = Path()
    for folder in (mount / inside, *(mount / parent for parent in inside.parents)):
        if folder.is_dir():
            yield folder


def _cores(folder: Path) -> float | None:
    quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us") or ""
        period = _text(folder / "cpu.cfs_period_us") or ""
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None  # `max`, -1, or no such controller here
    return int(quota) / int(period)


def _memory_limit(folder: Path) -> tuple[int, int] | None:
    """Limit and what is used of it. Page cache is not counted: the kernel drops it before it kills."""
    limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes") or ""
    if not limit.isdigit() or int(limit) >= _V1_UNLIMITED_BYTES:
        return None
    used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes") or "0"
    stat = dict(line.split(" ", 1) for line in (_text(folder / "memory.stat") or "").splitlines())
    cache = sum(int(stat.get(f"total_{key}", stat.get(key, "0"))) for key in ("inactive_file", "active_file"))
    return int(limit), max(0, int(used) - cache)


def _memory(root: Path) -> tuple[int, int]:
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])


def _cpuinfo(root: Path) -> tuple[str | None, frozenset[str]]:
    fields: dict[str, str] = {}
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        name, found, value = line.partition(":")
        if found:
            fields.setdefault(name.strip(), value.strip())
    return fields.get("model name"), frozenset(fields.get("flags", "").split())


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
