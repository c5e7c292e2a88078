"""Does the model come off its disk in time? Pure rules: evidence in, findings out, one fault each."""

from __future__ import annotations

from collections.abc import Iterator

from llamarack.hardware.evidence import Evidence
from llamarack.hardware.finding import Finding, Severity
from llamarack.units import GIB, MIB, format_bytes, format_duration, format_rate

_DISK_RESERVE_BYTES = 2 * GIB  # engine logs, journals and results
# The default deadline of a start (`supervise.start_deadline: auto`): 5 min + 20 s per GiB of weights.
_START_FIXED_S, _START_PER_GIB_S = 300.0, 20.0
_LONG_LOAD_S = 120.0


def slow(evidence: Evidence) -> Iterator[Finding]:
    """Too slow now, or a network file system, which may be so at any time."""
    for disk in evidence.disks:
        predicted_s = disk.predicted_read_s
        deadline_s = _START_FIXED_S + _START_PER_GIB_S * disk.size_bytes / GIB
        speed = format_rate((disk.read_bytes_per_s or 0) / MIB, "MiB/s")
        place = f"{disk.file_system} {'(network)' if disk.is_network else '(local)'}"
        if predicted_s is not None and predicted_s > _LONG_LOAD_S:
            yield Finding(
                code="disk_slow",
                severity=Severity.ERROR if predicted_s > deadline_s else Severity.WARNING,
                subject=disk.path,
                seen=f"{speed} from {place}, {(disk.cached_fraction or 0):.0%} in memory: reading "
                f"{format_bytes(disk.size_bytes)} takes {format_duration(predicted_s)}",
                why=f"a start has {format_duration(deadline_s)} by default; a less patient health check kills it",
                fix="copy the model to a local NVMe disk, and name that path in the file",
            )
        elif disk.is_network:
            yield Finding(
                code="disk_network",
                severity=Severity.WARNING,
                subject=disk.path,
                seen=f"the model lies on {disk.file_system}, a network file system ({speed} now)",
                why="loads get slow when others use the server, and hang when it is away",
                fix="copy the model to a local disk, and name that path in the file",
            )


def full(evidence: Evidence) -> Iterator[Finding]:
    for disk in evidence.disks:
        if disk.free_bytes is not None and disk.free_bytes < _DISK_RESERVE_BYTES:
            yield Finding(
                code="disk_full",
                severity=Severity.WARNING,
                subject=disk.path,
                seen=f"{format_bytes(disk.free_bytes)} free on this file system",
                why="conversions, caches and logs stop there",
                fix=f"free some space: du -xh --max-depth=1 {disk.path.rpartition('/')[0] or '/'} | sort -h",
            )


def larger_than_memory(evidence: Evidence) -> Iterator[Finding]:
    memory_bytes = evidence.machine.host.memory_total_bytes
    for disk in evidence.disks:
        if disk.size_bytes > memory_bytes:
            yield Finding(
                code="memory_smaller_than_model",
                severity=Severity.WARNING,
                subject=disk.path,
                seen=f"{format_bytes(disk.size_bytes)} of weights; this process may use "
                f"{format_bytes(memory_bytes)} of memory",
                why="the page cache cannot hold the model: every start reads all of it from the disk again",
                fix="raise the container's memory limit, or expect the load time of a cold disk each time",
            )


RULES = (slow, full, larger_than_memory)
