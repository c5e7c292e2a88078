"""How far a load is, whether it moves, and why it is slow: from the engine's log, its memory and what it read.

`Load` is sampled by the replica that loads; `slow_causes` is pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.hardware.disk import is_network
from llamarack.hardware.machine import Host
from llamarack.units import GIB, MIB, format_bytes

_SAMPLE_S = 1.0
# A load that has not moved for this long does not: a page comes from the slowest disk in less.
STILL_S = 60.0
_EXTENSION = 3.0  # times the deadline, for a load that moves
_MOVED_BYTES = 1 * MIB
_MOVED_PROCESSOR_S = 0.05
_FEW_CORES = 8  # below, tokenizers and kernels of a large model are prepared noticeably slower
_LARGE_BYTES = GIB // 4  # a smaller file is read at once from any disk
_MEMORY_LOW_FRACTION = 0.05
_SLOW_READ_BYTES_PER_S = 500e6  # a SATA disk; any NVMe reads 2 GB/s and more


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """`fraction`: 0 to 1, None where neither log nor memory tells. `read_bytes`: from a disk, not from a cache."""

    at_monotonic_s: float
    log_bytes: int
    fraction: float | None = None
    resident_bytes: int | None = None
    read_bytes: int | None = None
    processor_s: float | None = None


def moved(before: LoadState, now: LoadState) -> bool:
    """Whether anything went on between two looks."""
    return (
        now.log_bytes != before.log_bytes
        or (now.fraction or 0.0) > (before.fraction or 0.0)
        or (now.resident_bytes or 0) - (before.resident_bytes or 0) >= _MOVED_BYTES
        or (now.read_bytes or 0) - (before.read_bytes or 0) >= _MOVED_BYTES
        or (now.processor_s or 0.0) - (before.processor_s or 0.0) >= _MOVED_PROCESSOR_S
    )


class Load:
    """One load, from its spawn. `deadline_s` counts from there; `may_extend`: it was not set by hand."""

    def __init__(self, *, now_monotonic_s: float, deadline_s: float, may_extend: bool, weights_bytes: int) -> None:
        self.started_s = now_monotonic_s
        self.deadline_s = deadline_s
        self.weights_bytes = weights_bytes
        self._may_extend = may_extend
        self.state = LoadState(at_monotonic_s=now_monotonic_s, log_bytes=0)
        self.moved_s = now_monotonic_s
        self.is_slow_told = False

    def is_due(self, now_monotonic_s: float) -> bool:
        return now_monotonic_s - self.state.at_monotonic_s >= _SAMPLE_S

    def take(self, state: LoadState) -> None:
        if moved(self.state, state):
            self.moved_s = state.at_monotonic_s
        self.state = state

    def is_over(self, now_monotonic_s: float) -> bool:
        """Past the deadline; one that moves gets up to three times as long, unless somebody set the time by hand."""
        took_s = now_monotonic_s - self.started_s
        if took_s < self.deadline_s:
            return False
        still_moves = now_monotonic_s - self.moved_s < STILL_S
        return not (self._may_extend and still_moves and took_s < self.deadline_s * _EXTENSION)

    def is_slow(self, now_monotonic_s: float) -> bool:
        return now_monotonic_s - self.started_s >= self.deadline_s / 2


def read_state(
    pid: int | None, log: Path, *, now_monotonic_s: float, fraction: float | None, weights_bytes: int, on_cards: bool
) -> LoadState:
    """`fraction`: what the log tells; else, on the processor, how much of the weights is in memory."""
    import psutil  # a short load is never looked at

    resident = read = 0
    processor_s = 0.0
    with contextlib.suppress(psutil.Error):
        if pid is not None:
            engine = psutil.Process(pid)
            for process in (engine, *engine.children(recursive=True)):
                times = process.cpu_times()
                resident += process.memory_info().rss
                processor_s += times.user + times.system
                with contextlib.suppress(psutil.AccessDenied):
                    read += process.io_counters().read_bytes
    if fraction is None and not on_cards and weights_bytes:
        fraction = min(0.99, resident / weights_bytes)
    return LoadState(
        at_monotonic_s=now_monotonic_s,
        log_bytes=log.stat().st_size if log.exists() else 0,
        fraction=fraction,
        resident_bytes=resident,
        read_bytes=read,
        processor_s=processor_s,
    )


def slow_causes(load: Load, now_monotonic_s: float, *, file_system: str | None, host: Host) -> Sequence[str]:
    """Why this load is slow or stuck, as far as it can be told; the likeliest first."""
    state, took_s = load.state, max(now_monotonic_s - load.started_s, 1e-3)
    causes = []
    still_s = now_monotonic_s - load.moved_s
    if still_s >= min(STILL_S, load.deadline_s / 2):
        causes.append(f"no output, no processor time and no memory for {still_s:.0f} s")
    if is_network(file_system):
        causes.append(f"the model lies on a network file system ({file_system}): copy it to a local NVMe disk")
    read = state.read_bytes or 0
    is_cold = load.weights_bytes >= _LARGE_BYTES and read > 0.1 * load.weights_bytes
    if is_cold and read / took_s < _SLOW_READ_BYTES_PER_S:
        causes.append(
            f"a cold cache: {format_bytes(read)} came from the disk at {format_bytes(read / took_s)} a second; the "
            "next start finds them in memory, a local NVMe disk is faster"
        )
    if host.memory_available_bytes < host.memory_total_bytes * _MEMORY_LOW_FRACTION:
        causes.append(
            f"memory is not free: {format_bytes(host.memory_available_bytes)} of "
            f"{format_bytes(host.memory_total_bytes)} are available"
        )
    if host.cores_usable < _FEW_CORES:
        causes.append(f"only {host.cores_usable} processor cores may be used: raise the container's CPU limit")
    return causes
