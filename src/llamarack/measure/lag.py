"""Is this process itself late? Samples of the event loop's lag, and the share of one processor used.

A sample asks to be woken after 5 ms and takes the excess. uvloop and epoll wake at whole milliseconds, so about 1 ms of
it is the clock's grain and not lag.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from llamarack.measure.distribution import Summary, summarize

INTERVAL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """`cpu_fraction`: of one processor, this process only."""

    event_loop_s: Summary
    cpu_fraction: float | None


class LagMonitor:
    """`with LagMonitor() as monitor:` inside a running loop; `between` may be asked at any time."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, float]] = []
        self._cpu: list[tuple[int, float]] = []
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> LagMonitor:
        self._task = asyncio.get_running_loop().create_task(self._sample())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    def between(self, start_ns: int, end_ns: int) -> Lag:
        """Of the samples taken in this span of CLOCK_MONOTONIC."""
        values = [lag for at, late in self._samples if start_ns <= at <= end_ns for lag in _missed(late)]
        cpu = [(at, seconds) for at, seconds in self._cpu if start_ns <= at <= end_ns]
        span_s = (cpu[-1][0] - cpu[0][0]) * 1e-9 if cpu else 0.0
        return Lag(
            event_loop_s=summarize(values, with_intervals=False),
            cpu_fraction=(cpu[-1][1] - cpu[0][1]) / span_s if span_s > 0 else None,
        )

    async def _sample(self) -> None:
        while True:
            before_ns = time.monotonic_ns()
            await asyncio.sleep(INTERVAL_S)
            now_ns = time.monotonic_ns()
            self._samples.append((now_ns, max(0.0, (now_ns - before_ns) * 1e-9 - INTERVAL_S)))
            self._cpu.append((now_ns, time.process_time()))


def _missed(late_s: float) -> list[float]:
    """The samples that a block of this length swallowed are made up for, else a second's stall would weigh as little
    as a millisecond's: a wake-up late by 12 ms also stands for the ones that were due 5 and 10 ms in.
    """
    return [late_s - INTERVAL_S * step for step in range(1 + int(late_s / INTERVAL_S))]
