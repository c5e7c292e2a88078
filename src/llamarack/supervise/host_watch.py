"""What the host says: memory, processor, disk, descriptors, the clock. What runs short is told, and told again when it
comes back; nothing here ends anything."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from llamarack.hardware.host import read_host
from llamarack.supervise.journal import Journal
from llamarack.units import MIB, format_bytes, format_duration

_DISK_LOW_BYTES = 256 * MIB  # logs and journal of a day
_MEMORY_LOW_FRACTION = 0.05
_DESCRIPTORS_LOW_FRACTION = 0.9
_CLOCK_STEP_S = 5.0  # time servers slew less between two looks


class HostWatch:
    """`look` is called at each interval; `record` is `host` of the status record."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal = journal
        self._folder = folder
        self._wall_s, self._steady_s = time.time(), time.monotonic()
        self._low: set[str] = set()
        self._record: dict[str, Any] = {}
        psutil.cpu_percent(None)  # the first answer is since boot

    def look(self, processes: Mapping[str, int]) -> None:
        """`processes`: pids whose descriptors are counted, by name."""
        self._clock()
        host = read_host()
        free_bytes = _free_bytes(self._folder)
        self._record = {
            "cpu_fraction": psutil.cpu_percent(None) / 100,
            "cores_usable": host.cores_usable,
            "memory_total_bytes": host.memory_total_bytes,
            "memory_used_bytes": host.memory_total_bytes - host.memory_available_bytes,
            "state_disk_free_bytes": free_bytes,
        }
        self._tell(
            "disk_low",
            free_bytes is not None and free_bytes < _DISK_LOW_BYTES,
            f"{format_bytes(free_bytes)} are free in `{self._folder}`: logs and events will be lost",
            f"df -h {self._folder}",
        )
        self._tell(
            "host_memory_low",
            host.memory_available_bytes < host.memory_total_bytes * _MEMORY_LOW_FRACTION,
            f"{format_bytes(host.memory_available_bytes)} of {format_bytes(host.memory_total_bytes)} are available: "
            "the out-of-memory killer is near",
            "free -h; lower limits.sequences or limits.context_tokens, or give the host more RAM",
        )
        for name, pid in processes.items():
            used, limit = _descriptors(pid)
            self._tell(
                f"descriptors_low {name}",
                limit is not None and used >= limit * _DESCRIPTORS_LOW_FRACTION,
                f"{name} (process {pid}) has {used} of {limit} file descriptors open: new connections will be refused",
                "raise it: ulimit -n 65536 before llamarack serve, or LimitNOFILE= of the service",
            )

    def record(self) -> dict[str, Any]:
        return self._record

    def _clock(self) -> None:
        """Deadlines use the steady clock, so that only times shown are wrong."""
        wall_s, steady_s = time.time(), time.monotonic()
        step_s = (wall_s - self._wall_s) - (steady_s - self._steady_s)
        self._wall_s, self._steady_s = wall_s, steady_s
        if abs(step_s) >= _CLOCK_STEP_S:
            way = "forward" if step_s > 0 else "back"
            self._journal.warn(
                "clock_moved",
                f"the clock was set {way} by {format_duration(abs(step_s))}; times before and after do not compare",
                hint="timedatectl status",
                step_s=step_s,
            )

    def _tell(self, key: str, is_low: bool, message: str, hint: str) -> None:
        kind = key.split()[0]
        if is_low and key not in self._low:
            self._low.add(key)
            self._journal.warn(kind, message, hint=hint)
        elif not is_low and key in self._low:
            self._low.discard(key)
            self._journal.note(f"{kind}_over", f"{key.replace('_', ' ')}: over")


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _descriptors(pid: int) -> tuple[int, int | None]:
    """Open ones and the soft limit; no limit known: None."""
    try:
        used = len(os.listdir(f"/proc/{pid}/fd"))
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
            if line.startswith("Max open files"):
                soft = line.split()[3]
                return used, int(soft) if soft.isdigit() else None
    except (OSError, ValueError, IndexError):
        pass
    return 0, None
