"""The worker processes of one load level, from their start to their last line.

The parent only hands out signals, so nothing it does (progress, server counters) delays a stamp. Workers have a session
of their own: Ctrl-C reaches the parent alone, which stops them in order; if the parent dies, the end of their standard
input stops them.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from llamarack.errors import InvalidRun
from llamarack.measure.record import Phase
from llamarack.measure.worker import Order, WorkerReport

_COMMAND = (sys.executable, "-c", "from llamarack.measure.worker import main; main()")
_STOP_TIMEOUT_S = 10.0
_COMMON_START_NS = 20_000_000  # ahead, so that the signal has reached every worker
_MAX_LINE_BYTES = 64 * 1024 * 1024  # a report holds every connection's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Of one level. `finished`: measured requests that ended, failed ones among them."""

    phase: Phase
    finished: int
    failed: int


class Crew:
    """`run` once. Cancelling it stops the workers within `_STOP_TIMEOUT_S` and raises CancelledError."""

    def __init__(self, orders: Sequence[Order], on_progress: Callable[[Progress], None]) -> None:
        self._orders = orders
        self._on_progress = on_progress
        self._processes: list[asyncio.subprocess.Process] = []
        self._warm = 0
        self._done = 0
        self._counts: dict[int, tuple[int, int]] = {}  # by process: measured requests finished, failed
        self._changed = asyncio.Event()
        self._reports: list[WorkerReport] = []

    @property
    def reports(self) -> tuple[WorkerReport, ...]:
        """Of the workers that have ended; after a cancelled `run` too."""
        return tuple(self._reports)

    async def run(self, *, deadline_s: float) -> tuple[WorkerReport, ...]:
        """`deadline_s`: for all of it. Raises InvalidRun where a worker dies or the time is over."""
        listeners: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(deadline_s):
                for order in self._orders:
                    listeners.append(asyncio.create_task(self._listen(await self._start(order))))
                await self._until(lambda: self._warm == len(self._orders), listeners)
                self._tell(f"measure {time.monotonic_ns() + _COMMON_START_NS}")
                await self._until(lambda: self._done == len(self._orders), listeners)
                self._tell("stop")
                await asyncio.wait(listeners)
        except TimeoutError as error:
            raise InvalidRun(
                f"the level did not end within {deadline_s:.0f} s", hint="fewer --requests, or a longer --timeout"
            ) from error
        finally:
            await self._stop(listeners)
        for listener in listeners:
            listener.result()
        return self.reports

    async def _start(self, order: Order) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        self._processes.append(process)
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(order).hex().encode() + b"\n")
        return process

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        has_reported = False
        while line := await process.stdout.readline():
            message = orjson.loads(line)
            has_reported |= self._hear(process.pid, message)
            self._changed.set()
        await process.wait()
        self._changed.set()
        if not has_reported:
            raise InvalidRun(f"a load worker died with exit status {process.returncode}", hint="its traceback is above")

    def _hear(self, pid: int, message: Any) -> bool:
        """True for the last message of a worker."""
        if message == "warm":
            self._warm += 1
        elif message == "done":
            self._done += 1
        elif "report" in message:
            self._reports.append(pickle.loads(bytes.fromhex(message["report"])))
            return True
        else:
            self._counts[pid] = (message["finished"], message["failed"])
            finished, failed = (sum(each) for each in zip(*self._counts.values(), strict=True))
            self._on_progress(Progress(phase=Phase(message["phase"]), finished=finished, failed=failed))
        return False

    async def _until(self, is_reached: Callable[[], bool], listeners: Sequence[asyncio.Task[None]]) -> None:
        """Returns early when a worker has gone: its listener then holds the reason."""
        while not is_reached() and not any(listener.done() for listener in listeners):
            self._changed.clear()
            if self._done == len(self._orders):
                return  # every worker gave up during warm-up
            await self._changed.wait()

    def _tell(self, command: str) -> None:
        for process in self._processes:
            if process.stdin is not None and process.returncode is None:
                process.stdin.write(command.encode() + b"\n")

    async def _stop(self, listeners: Sequence[asyncio.Task[None]]) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        try:
            if listeners:
                await asyncio.wait(listeners, timeout=_STOP_TIMEOUT_S)
        finally:  # also when a second Ctrl-C cancels this wait
            for listener in listeners:
                listener.cancel()
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
            await asyncio.gather(*(process.wait() for process in self._processes))
