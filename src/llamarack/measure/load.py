"""One worker's share of the load, from warm-up to the last measured request, without a gap.

    warm-up    until every slot (closed loop) or the warm-up time (open loop) is through, and `measure` is set
    measured   until the share of requests is sent or the time is over
    cool-down  the same load goes on until `stop` is set, so that the last measured requests do not run on an emptying
               server; what is then in flight is broken off

Closed loop: each slot sends its next request when its last has ended. Open loop: requests leave when the schedule says
so, whatever the server does, and a late one is charged from its scheduled time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from llamarack.measure.arrivals import Arrivals, arrival_offsets_s
from llamarack.measure.client import Client, Job
from llamarack.measure.prompts import PromptSource, prompt
from llamarack.measure.record import Phase, RequestRecord
from llamarack.measure.server import Served, request_body

NANO = 1_000_000_000
_PAUSE_AFTER_FAILURE_S = 0.05  # a server that refuses at once is not asked 10,000 times a second
_MAX_FAILURES_IN_A_ROW = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """`slots` and `requests`: of this worker."""

    slots: int
    requests: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """`rate_per_s` and `requests`: of all workers; this one takes every `num_workers`-th arrival."""

    rate_per_s: float
    arrivals: Arrivals
    requests: int | None
    warm_up_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker does at one point. One of `requests` (in `loop`) and `duration_s` is set."""

    loop: ClosedLoop | OpenLoop
    worker: int
    num_workers: int
    point: int
    repeat: int
    served: Served
    prompts: PromptSource
    output_tokens: int | None
    is_fixed_length: bool
    is_cache_wanted: bool
    duration_s: float | None
    timeout_s: float
    seed: int


class Signals:
    """Set from outside: `measure` for all workers (with a common start), `stop` when nothing more is needed.
    Called from inside: `on_record` for each finished request, `on_warm` and `on_done` once.
    """

    def __init__(
        self,
        *,
        on_record: Callable[[RequestRecord], None],
        on_warm: Callable[[], None],
        on_done: Callable[[], None],
    ) -> None:
        self.measure = asyncio.Event()
        self.start_monotonic_ns: int | None = None
        self.stop = asyncio.Event()
        self.on_record = on_record
        self.on_warm = on_warm
        self.on_done = on_done


class LoadRun:
    """Owns the requests of one share. `run` returns when `stop` is set and everything in flight has ended."""

    def __init__(self, share: Share, client: Client, signals: Signals) -> None:
        self._share = share
        self._client = client
        self._signals = signals
        self._indices = itertools.count(share.worker, share.num_workers)
        self._measured_left = 0
        self._in_flight_measured = 0
        self._end_ns: int | None = None
        self._is_sending_over = False
        self._slots_warm = 0
        self._failures_in_a_row = 0
        self._is_done = False

    async def run(self) -> None:
        match self._share.loop:
            case ClosedLoop(slots=slots):
                async with asyncio.TaskGroup() as group:
                    for _ in range(slots):
                        group.create_task(self._slot())
            case OpenLoop() as loop:
                await self._open(loop)

    async def _slot(self) -> None:
        is_warm = False
        while not self._signals.stop.is_set():
            record = await self._one(time.monotonic_ns(), self._closed_phase())
            if not is_warm:
                is_warm = True
                self._slots_warm += 1
                if isinstance(self._share.loop, ClosedLoop) and self._slots_warm == self._share.loop.slots:
                    self._signals.on_warm()
            if record.is_failure:
                await self._wait(_PAUSE_AFTER_FAILURE_S)

    def _closed_phase(self) -> Phase:
        if not self._signals.measure.is_set():
            return Phase.WARM_UP
        now_ns = time.monotonic_ns()
        if self._end_ns is None:
            self._begin(now_ns, self._share.loop.requests)
        return self._measured_phase(now_ns)

    def _begin(self, now_ns: int, requests: int | None) -> None:
        duration_s = self._share.duration_s
        self._end_ns = now_ns + (round(duration_s * NANO) if duration_s is not None else 10**18)
        self._measured_left = requests if requests is not None else 10**18

    def _measured_phase(self, now_ns: int) -> Phase:
        assert self._end_ns is not None
        if self._measured_left > 0 and now_ns < self._end_ns:
            self._measured_left -= 1
            return Phase.MEASURED
        self._is_sending_over = True
        self._check_done()
        return Phase.COOL_DOWN

    async def _open(self, loop: OpenLoop) -> None:
        share = self._share
        self._signals.on_warm()
        await self._either(self._signals.measure, None)  # the common start; warm-up is part of the schedule
        start_ns = self._signals.start_monotonic_ns or time.monotonic_ns()
        async with asyncio.TaskGroup() as group:
            for number, offset_s in enumerate(arrival_offsets_s(loop.arrivals, loop.rate_per_s, seed=share.seed)):
                if number % share.num_workers != share.worker:
                    continue
                scheduled_ns = start_ns + round(offset_s * NANO)
                # Timers have a grain of 1 ms and may be early by it; no request leaves before its time.
                while (early_ns := scheduled_ns - time.monotonic_ns()) > 0 and not self._signals.stop.is_set():
                    await self._wait(early_ns / NANO)
                if self._signals.stop.is_set():
                    return
                group.create_task(self._one(scheduled_ns, self._open_phase(loop, number, scheduled_ns)))

    def _open_phase(self, loop: OpenLoop, number: int, scheduled_ns: int) -> Phase:
        if number < loop.warm_up_requests:
            return Phase.WARM_UP
        if self._end_ns is None:
            first = loop.warm_up_requests
            mine = None if loop.requests is None else _share_of(loop.requests, first, self._share)
            self._begin(scheduled_ns, mine)
        return self._measured_phase(scheduled_ns)

    async def _one(self, scheduled_ns: int, phase: Phase) -> RequestRecord:
        share, index = self._share, next(self._indices)
        question = prompt(share.prompts, point=share.point, repeat=share.repeat, index=index)
        body = request_body(
            share.served,
            question.text,
            output_tokens=share.output_tokens,
            is_fixed_length=share.is_fixed_length,
            is_cache_wanted=share.is_cache_wanted,
        )
        job = Job(
            index=index,
            path=share.served.endpoint.path,
            body=body,
            phase=phase,
            prompt_id=question.id,
            scheduled_monotonic_ns=scheduled_ns,
            requested_output_tokens=share.output_tokens,
        )
        self._in_flight_measured += phase is Phase.MEASURED
        record = await self._client.stream_until(job, timeout_s=share.timeout_s, stop=self._signals.stop)
        self._in_flight_measured -= phase is Phase.MEASURED
        self._signals.on_record(record)
        self._failures_in_a_row = self._failures_in_a_row + 1 if record.is_failure else 0
        self._check_done()
        return record

    def _check_done(self) -> None:
        """All measured requests have ended, or nothing works and going on would prove nothing."""
        is_over = self._is_sending_over or (self._end_ns is not None and self._measured_left == 0)
        is_hopeless = self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW
        if not self._is_done and ((is_over and self._in_flight_measured == 0) or is_hopeless):
            self._is_done = True
            self._signals.on_done()

    async def _wait(self, seconds: float) -> None:
        if seconds > 0:
            await self._either(self._signals.stop, seconds)

    async def _either(self, event: asyncio.Event, seconds: float | None) -> None:
        """Until the event, the time, or `stop`."""
        waiting = {asyncio.ensure_future(each.wait()) for each in (event, self._signals.stop)}
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()


def _share_of(requests: int, first: int, share: Share) -> int:
    """How many of the arrivals `first` to `first + requests` are this worker's."""
    return sum(number % share.num_workers == share.worker for number in range(first, first + requests))
