"""The phases of a share of load, in process, driven by signals instead of time."""

import asyncio
import dataclasses
import time
from contextlib import asynccontextmanager

import pytest

from llamarack.measure.arrivals import Arrivals
from llamarack.measure.client import Client
from llamarack.measure.load import ClosedLoop, LoadRun, OpenLoop, Share, Signals
from llamarack.measure.record import Phase, RequestRecord
from llamarack.measure.server import Served
from llamarack.measure.target import Endpoint, parse_target
from tests.measure.golden_server import GoldenServer, Script, no_wait, obedient_script, serving, steps
from tests.measure.test_prompts import SYNTHETIC

TIMEOUT_S = 20
SERVED = Served(model="m", endpoint=Endpoint.CHAT, extras=(), has_usage=True, round_trip_s=0.001, notes=())
SHARE = Share(
    loop=ClosedLoop(slots=3, requests=10),
    worker=0,
    num_workers=1,
    point=0,
    repeat=0,
    served=SERVED,
    prompts=SYNTHETIC,
    output_tokens=4,
    is_fixed_length=False,
    is_cache_wanted=False,
    duration_s=None,
    timeout_s=TIMEOUT_S,
    seed=1,
)


class Watched(Signals):
    """Signals whose own side can be awaited."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.warm, self.done, self.arrived = asyncio.Event(), asyncio.Event(), asyncio.Event()
        super().__init__(on_record=self._record, on_warm=self.warm.set, on_done=self.done.set)

    def _record(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.arrived.set()

    def of(self, phase: Phase) -> list[RequestRecord]:
        return [record for record in self.records if record.phase is phase]


@asynccontextmanager
async def running(share: Share, script=obedient_script):
    server = GoldenServer(scripts={"m": script}, between=no_wait)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    signals = Watched()
    async with serving(server, listener) as port, asyncio.timeout(TIMEOUT_S):
        client = Client(parse_target(f"http://127.0.0.1:{port}"))
        task = asyncio.create_task(LoadRun(share, client, signals).run())
        yield signals, server
        signals.stop.set()
        await task
        client.close()


async def test_warm_up_goes_on_until_the_measured_phase_is_called() -> None:
    async with running(SHARE) as (signals, _):
        await signals.warm.wait()
        before = len(signals.records)
        while len(signals.records) < before + 6:
            signals.arrived.clear()
            await signals.arrived.wait()
        assert signals.of(Phase.MEASURED) == []
        assert not signals.done.is_set()


async def test_measured_requests_are_exactly_those_asked_for_and_slots_stay_busy_after_them() -> None:
    async with running(SHARE) as (signals, server):
        await signals.warm.wait()
        signals.measure.set()
        await signals.done.wait()
        assert len(signals.of(Phase.MEASURED)) == 10
        for _ in range(5):  # the level is kept after the last measured request, until stop
            signals.arrived.clear()
            await signals.arrived.wait()
        assert len(signals.of(Phase.MEASURED)) == 10
        assert len(signals.of(Phase.COOL_DOWN)) >= 5
        assert server.num_connections == 3


async def test_stop_breaks_off_what_is_in_flight() -> None:
    hung = Script(steps=steps(b": open\n\n"), end="hang")
    async with running(SHARE, lambda _: hung) as (signals, server):
        while len(server.bodies) < 3:
            await asyncio.sleep(0)
        signals.stop.set()
    assert [record.is_cancelled for record in signals.records] == [True] * 3
    assert not any(record.is_failure for record in signals.records)


async def test_duration_ends_the_sending_of_measured_requests() -> None:
    share = dataclasses.replace(SHARE, loop=ClosedLoop(slots=2, requests=None), duration_s=0.05)
    async with running(share) as (signals, _):
        await signals.warm.wait()
        signals.measure.set()
        await signals.done.wait()
        sent = [r.sent_monotonic_ns for r in signals.of(Phase.MEASURED) if r.sent_monotonic_ns is not None]
        # One slot may have been woken late, so only the decision is held to the time, not the last request's end.
        assert sent
        assert (max(r.scheduled_monotonic_ns for r in signals.of(Phase.MEASURED)) - min(sent)) * 1e-9 <= 0.05


@pytest.mark.parametrize("num_workers", [1, 3])
async def test_open_loop_workers_share_one_schedule_without_overlap(num_workers: int) -> None:
    loop = OpenLoop(rate_per_s=500.0, arrivals=Arrivals.POISSON, requests=30, warm_up_requests=6)
    scheduled: list[int] = []
    start_ns = time.monotonic_ns()
    for worker in range(num_workers):
        share = dataclasses.replace(SHARE, loop=loop, worker=worker, num_workers=num_workers)
        async with running(share) as (signals, _):
            signals.start_monotonic_ns = start_ns
            signals.measure.set()
            await signals.done.wait()
        # After the run: a warm-up request may outlive the last measured one and is recorded when it is broken off.
        scheduled += [record.scheduled_monotonic_ns for record in signals.of(Phase.MEASURED)]
        assert len(signals.of(Phase.WARM_UP)) == 6 // num_workers
    assert len(set(scheduled)) == 30


async def test_open_loop_charges_a_late_start_to_the_schedule() -> None:
    loop = OpenLoop(rate_per_s=1000.0, arrivals=Arrivals.CONSTANT, requests=5, warm_up_requests=0)
    async with running(dataclasses.replace(SHARE, loop=loop)) as (signals, _):
        signals.start_monotonic_ns = time.monotonic_ns() - 1_000_000_000
        signals.measure.set()
        await signals.done.wait()
        for record in signals.of(Phase.MEASURED):
            assert record.sent_monotonic_ns is not None
            assert record.sent_monotonic_ns - record.scheduled_monotonic_ns >= 990_000_000
