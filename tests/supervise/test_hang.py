"""Engines that answer /health and make no tokens are found, ended and started again; busy ones are left alone."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.supervise.asking import many, stream_once
from tests.supervise.conftest import left_of, order, running_rack, until_http_ready
from tests.supervise.faults import Fault

pytestmark = pytest.mark.process
STUCK_S = 10.0  # the gateway gives a request up after it, an engine counts as hung after half of it


@pytest.mark.fault(
    "engine answers /health and makes no tokens",
    "found by its counters while it has work, asked once, ended; the next start answers the request",
)
async def test_hung_engine_is_ended_and_its_silent_request_answered_by_the_next_start(
    tmp_path: Path, fault: Fault
) -> None:
    async with running_rack(tmp_path, [{}], stuck_request_s=STUCK_S) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        victim = rack.supervisor.replicas[0]
        await order(victim, hang_engine=True)
        fault.strikes()
        asked = asyncio.create_task(stream_once(rack.url, tokens=5))
        await rack.until(lambda: "died" in rack.kinds())
        fault.is_found()
        outcome = await asked
        fault.is_over()
        assert (outcome.fault, outcome.events) == (None, 5)
        assert victim.restarts == 1
        assert victim.last_death is not None
        assert victim.last_death.cause == "hung"
        assert "no token for" in victim.last_death.message
    assert not left_of(tmp_path)


@pytest.mark.fault("long prefill, which looks like a hang", "left alone: the engine's steps go on")
async def test_long_prefill_is_not_touched(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}], stuck_request_s=STUCK_S) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        outcome = await stream_once(rack.url, tokens=3, directive=f"[[fault prefill_s={0.7 * STUCK_S}]]")
        assert outcome.fault is None
        assert "died" not in rack.kinds()


@pytest.mark.fault("counters that lie", "the engine is asked before it is ended, and left alone when it answers")
async def test_engine_whose_counters_stand_still_is_asked_before_it_is_ended(tmp_path: Path) -> None:
    faults = {"metrics_lie": "frozen", "token_interval_s": 0.1}
    async with running_rack(tmp_path, [faults], stuck_request_s=4) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        outcomes = await many(rack.url, 3, tokens=40)
        assert [outcome.fault for outcome in outcomes] == [None] * 3
        assert "died" not in rack.kinds()


async def test_engine_without_counters_is_told_and_left_alone(tmp_path: Path) -> None:
    faults = {"metrics_lie": "absent", "token_interval_s": 0.1}
    async with running_rack(tmp_path, [faults], stuck_request_s=4) as rack:
        await rack.until_ready()
        await rack.until(lambda: "progress_unknown" in rack.kinds())
        await until_http_ready(rack.url)
        assert (await stream_once(rack.url, tokens=30)).fault is None
        assert "died" not in rack.kinds()


@pytest.mark.fault("counters that are no numbers", "not counted; the others are, and nothing ends")
async def test_counter_that_is_nan_ends_nothing(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"metrics_lie": "nan", "token_interval_s": 0.1}], stuck_request_s=4) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        assert (await stream_once(rack.url, tokens=30)).fault is None
        assert rack.running is not None
        assert not rack.running.done()
        assert rack.kinds().count("progress_unknown") == 0


@pytest.mark.fault("engine stopped by SIGSTOP while idle", "ended and started again before a client meets it")
async def test_stopped_engine_is_found_also_while_idle(tmp_path: Path, fault: Fault) -> None:
    async with running_rack(tmp_path, [{}], stuck_request_s=4) as rack:
        await rack.until_ready()
        child = rack.supervisor.replicas[0].child
        assert child is not None
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        fault.strikes()
        await rack.until(lambda: "died" in rack.kinds())
        fault.is_found()
        await rack.until(lambda: rack.supervisor.replicas[0].restarts == 1)
        await rack.until_ready()
        fault.is_over()
    assert not left_of(tmp_path)


@pytest.mark.fault("engine stopped by SIGSTOP, SIGCONT in time", "left alone, no stream is lost")
async def test_engine_that_is_stopped_and_goes_on_in_time_loses_nothing(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"token_interval_s": 0.02}], stuck_request_s=30) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        child = rack.supervisor.replicas[0].child
        assert child is not None
        assert child.pid is not None
        asked = asyncio.create_task(many(rack.url, 3, tokens=60))
        await rack.until(lambda: rack.supervisor.gateways.in_flight_total() == 3)
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.sleep(0.7)
        os.kill(child.pid, signal.SIGCONT)
        assert [(outcome.fault, outcome.events) for outcome in await asked] == [(None, 60)] * 3
        assert rack.supervisor.replicas[0].child is child
