"""What one running engine uses, sampled: memory of its own in the host, processor time, processes; and its trend."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import psutil

from llamarack.supervise.slope import WINDOW, Leak, Sample, find_leak

_JUDGED_EVERY = 5  # samples
_LINES_BYTES = 65_536  # of a log that runs away, the newest


class EngineUsage:
    """From one start to its end. `leak` once found stays."""

    def __init__(self, log: Path) -> None:
        self._log_bytes = _size(log)
        self.samples: deque[Sample] = deque(maxlen=WINDOW)
        self.cores: float | None = None  # kept busy since the last sample
        self.leak: Leak | None = None
        self.is_leak_told = False
        self._taken = 0
        self._processor: tuple[float, float] | None = None  # seconds used, at which monotonic time

    def new_lines(self, log: Path) -> list[str]:
        """What it wrote since the last call; of a log that was turned over, what the new part holds."""
        size = _size(log)
        if size == self._log_bytes:
            return []
        since, self._log_bytes = self._log_bytes, size
        try:
            with open(log, "rb") as file:
                file.seek(max(since if since <= size else 0, size - _LINES_BYTES))
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def sample(self, pid: int | None) -> None:
        """Private memory only: mapped weights are page cache, and come in as they are read."""
        if pid is None:
            return
        private, processor_s = 0, 0.0
        try:
            engine = psutil.Process(pid)
            for process in (engine, *engine.children(recursive=True)):
                usage, times = process.memory_info(), process.cpu_times()
                private += max(0, usage.rss - usage.shared)
                processor_s += times.user + times.system
        except psutil.Error:
            return  # it is dying, which others see
        now = time.monotonic()
        if self._processor is not None and now > self._processor[1]:
            self.cores = max(0.0, processor_s - self._processor[0]) / (now - self._processor[1])
        self._processor = (processor_s, now)
        self.samples.append(Sample(at_s=now, memory_used_bytes=private))
        self._taken += 1
        if self.leak is None and self._taken % _JUDGED_EVERY == 0:
            self.leak = find_leak(list(self.samples))


def family(pid: int | None) -> list[int]:
    """A process and all that it forked; empty where there is none, or none any more."""
    if pid is None:
        return []
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
