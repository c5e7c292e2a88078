"""What the watch sees of real engines: leaks by their slope, slots that run short, the host, a clock that was set."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from llamarack.supervise.admin import ask
from llamarack.supervise.host_watch import HostWatch
from llamarack.supervise.journal import Journal
from llamarack.supervise.slope import WINDOW
from llamarack.supervise.state import State
from tests import fake_rack
from tests.fake_adaptor import FakeEngine
from tests.supervise.asking import Outcome, many, stream_once
from tests.supervise.conftest import (
    DEADLINE_S,
    RunningRack,
    left_of,
    order,
    rack_process,
    running_rack,
    until_http_ready,
)
from tests.supervise.faults import Fault

pytestmark = pytest.mark.process


async def _ask_until(stop: asyncio.Event, rack: RunningRack, outcomes: list[Outcome]) -> None:
    while not stop.is_set():
        outcomes.append(await stream_once(rack.url, tokens=4))


@pytest.mark.fault(
    "memory creeps up",
    "found by slope within 200 samples, recycled while another replica takes the traffic, no request lost",
)
async def test_leak_is_found_by_its_slope_and_the_engine_recycled_with_no_request_lost(
    tmp_path: Path, fault: Fault
) -> None:
    faults = {"token_interval_s": 0.01}
    async with running_rack(tmp_path, [{**faults, "leak_mib": 0.5}, faults], sample_s=0.06) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        leaking = rack.supervisor.replicas[0]
        first = leaking.child
        stop, outcomes = asyncio.Event(), list[Outcome]()
        asking = [asyncio.create_task(_ask_until(stop, rack, outcomes)) for _ in range(3)]
        fault.strikes()
        await rack.until(lambda: "leak" in rack.kinds())
        fault.is_found()
        await rack.until(lambda: leaking.restarts == 1 and leaking.state == "ready")
        fault.is_over()
        stop.set()
        await asyncio.gather(*asking)
        assert {outcome.fault for outcome in outcomes} == {None}
        assert leaking.child is not first
        (leak,) = [entry for entry in rack.supervisor.journal.recent if entry.kind == "leak"]
        assert leak.replica == "fake-0"
        assert leak.data["samples"] <= WINDOW
        assert leaking.last_death is None  # it did not die
        assert rack.supervisor.replicas[1].restarts == 0
    assert not left_of(tmp_path)


async def test_only_replica_of_its_model_is_told_and_not_recycled(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"leak_mib": 1}], sample_s=0.05) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        stop, outcomes = asyncio.Event(), list[Outcome]()
        asking = asyncio.create_task(_ask_until(stop, rack, outcomes))
        await rack.until(lambda: "leak" in rack.kinds())
        await asyncio.sleep(0.5)
        stop.set()
        await asking
        assert rack.supervisor.replicas[0].restarts == 0
        assert rack.kinds().count("leak") == 1


async def test_status_tells_of_the_host(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}], sample_s=0.1) as rack:
        await rack.until_ready()
        record = await ask(rack.supervisor.paths, {"op": "status"})
        host = record["host"]
        assert 0 < host["memory_used_bytes"] < host["memory_total_bytes"]
        assert 0 <= host["cpu_fraction"] <= 1
        assert record["cards"] == []


@pytest.mark.fault("file descriptors exhausted", "told before they run out; serves on once some are free")
async def test_exhausted_descriptors_are_told_and_the_gateway_serves_on_afterwards(tmp_path: Path) -> None:
    paths = fake_rack.paths_in(tmp_path)
    async with rack_process(tmp_path, [{}], before="ulimit -n 64") as (port, _):
        await until_http_ready(f"http://127.0.0.1:{port}")
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        async with asyncio.timeout(DEADLINE_S):
            kinds: list[str] = []
            while "descriptors_low" not in kinds:
                await asyncio.sleep(0.1)
                kinds = [each["kind"] for each in (await ask(paths, {"op": "events", "limit": 100}))["events"]]
        for _, writer in opened:
            writer.close()
        await until_http_ready(f"http://127.0.0.1:{port}")
        assert (await stream_once(f"http://127.0.0.1:{port}", tokens=3)).fault is None
    assert not left_of(tmp_path)


@pytest.mark.fault("clock set back an hour", "told; every deadline uses the steady clock")
async def test_clock_set_back_an_hour_is_told_and_nothing_else_happens(
    tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor's own view of the clock is set; its engines and gateway are other processes."""
    async with running_rack(tmp_path, [{"token_interval_s": 0.02}], sample_s=0.05, stuck_request_s=2) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        real = time.time
        asked = asyncio.create_task(many(rack.url, 3, tokens=60))
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
        fault.strikes()
        await rack.until(lambda: "clock_moved" in rack.kinds())
        fault.is_found()
        assert [outcome.fault for outcome in await asked] == [None] * 3
        told = [entry for entry in rack.supervisor.journal.recent if entry.kind == "clock_moved"]
        assert told[0].data["step_s"] == pytest.approx(-3600, abs=5)
        assert "died" not in rack.kinds()
        monkeypatch.setattr(time, "time", real)


def test_host_that_is_well_says_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    watch = HostWatch(journal, tmp_path)
    for _ in range(3):
        watch.look({"supervisor": os.getpid()})
    assert [entry.kind for entry in journal.recent if entry.kind != "host_memory_low"] == []


@pytest.mark.fault("fault of llamarack's own in the watch over an engine", "told, begun anew; nothing stops serving")
async def test_look_that_fails_is_told_and_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_rack(tmp_path, [{}], stuck_request_s=4, sample_s=0.2) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        with monkeypatch.context() as broken:
            broken.setattr(FakeEngine, "counters", None)
            await rack.until(lambda: rack.kinds().count("watch_failed") >= 2)
            assert (await stream_once(rack.url, tokens=3)).fault is None
        await order(rack.supervisor.replicas[0], hang_engine=True)
        assert (await stream_once(rack.url, tokens=3)).fault is None  # found, ended, and answered by the next start
        assert rack.supervisor.replicas[0].last_death is not None
        assert rack.supervisor.replicas[0].last_death.cause == "hung"


async def test_replica_that_takes_the_name_of_another_is_watched(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}], stuck_request_s=4, sample_s=0.2) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        (before,) = rack.supervisor.replicas
        await rack.supervisor.retire(before, patiently=False)
        after = rack.supervisor.add(before.spec)
        await rack.until_ready()
        await until_http_ready(rack.url)
        await order(after, hang_engine=True)
        assert (await stream_once(rack.url, tokens=3)).fault is None
        assert after.last_death is not None
        assert after.last_death.cause == "hung"


async def test_processes_of_an_engine_that_loads_are_the_racks(tmp_path: Path) -> None:
    """It fills its card before it is ready; the look at the cards must not take it for a stranger."""
    async with running_rack(tmp_path, [{"load_s": 60}], sample_s=0.1) as rack:
        await rack.until(lambda: set(rack.supervisor.watch.owners().values()) == {"fake-0"})
        assert rack.supervisor.replicas[0].state is State.LOADING


async def test_processes_of_a_replica_that_left_are_nobodys(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}, {}], sample_s=0.1) as rack:
        await rack.until_ready()
        await rack.until(lambda: set(rack.supervisor.watch.owners().values()) == {"fake-0", "fake-1"})
        await rack.supervisor.retire(rack.supervisor.replicas[0], patiently=False)
        await rack.until(lambda: set(rack.supervisor.watch.owners().values()) == {"fake-1"})
