"""A real supervisor with real keepers, a real gateway worker and fake engines: starts, stops and drains."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.errors import ConfigError, EngineError, UsageError
from llamarack.supervise.admin import ask
from llamarack.supervise.state import State
from tests import fake_rack
from tests.supervise.asking import many, stream_once
from tests.supervise.conftest import (
    DEADLINE_S,
    RunningRack,
    left_of,
    running_rack,
    until_http_ready,
)

pytestmark = pytest.mark.process


@pytest.mark.fault("two loads at once", "one at a time on the whole machine")
async def test_replicas_load_one_at_a_time_and_share_the_requests(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"load_s": 0.3, "token_interval_s": 0.01}] * 2) as rack:
        most_loading = 0

        def loading() -> bool:
            nonlocal most_loading
            states = [replica.state for replica in rack.supervisor.replicas]
            most_loading = max(most_loading, sum(state in (State.LOADING, State.WARMING) for state in states))
            return all(state is State.READY for state in states)

        await rack.until(loading)
        assert most_loading == 1
        await until_http_ready(rack.url)
        asked = asyncio.create_task(many(rack.url, 8))
        await rack.until(
            lambda: (
                {name: count for c in rack.supervisor.gateways.counts.values() for name, count in c.in_flight.items()}
                == {"fake-0": 4, "fake-1": 4}
            )
        )
        assert [outcome.fault for outcome in await asked] == [None] * 8
    assert not left_of(tmp_path)


@pytest.mark.fault("engine never becomes ready", "ended at its deadline, which goes by size")
async def test_engine_that_never_answers_is_ended_at_its_deadline(tmp_path: Path) -> None:
    supervisor = fake_rack.build(tmp_path, [{"never_ready": True, "start_deadline_s": 1.0}], restarts={"max": 0})
    rack = RunningRack(supervisor)
    await rack.start()
    assert rack.running is not None
    with pytest.raises(EngineError, match=r"not ready within 1\.00 s"):
        await asyncio.wait_for(rack.running, DEADLINE_S)
    await rack.stop()
    assert not left_of(tmp_path)


@pytest.mark.fault("garbage instead of language", "refused before traffic")
async def test_garbage_at_warm_up_is_refused_before_traffic(tmp_path: Path) -> None:
    rack = RunningRack(fake_rack.build(tmp_path, [{"garbage": True}], restarts={"max": 0}))
    await rack.start()
    assert rack.running is not None
    with pytest.raises(EngineError, match="the warm-up answer is garbage"):
        await asyncio.wait_for(rack.running, DEADLINE_S)
    await rack.stop()


async def test_stop_finishes_what_runs(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"token_interval_s": 0.02}]) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        asked = asyncio.create_task(stream_once(rack.url, tokens=60))
        await rack.until(lambda: rack.supervisor.gateways.in_flight_total() == 1)
        rack.supervisor.ask_stop()
        outcome = await asked
        assert (outcome.fault, outcome.events) == (None, 60)
    assert not left_of(tmp_path)


async def test_drain_of_one_replica_finishes_what_runs_there_and_leaves_the_other(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"token_interval_s": 0.02}] * 2) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        asked = asyncio.create_task(many(rack.url, 4, tokens=60))
        await rack.until(lambda: rack.supervisor.gateways.in_flight_total() == 4)
        assert (await ask(rack.supervisor.paths, {"op": "drain", "replica": "fake-0"}))["found"]
        await rack.until(lambda: rack.supervisor.replicas[0].state is State.STOPPED)
        assert [outcome.fault for outcome in await asked] == [None] * 4
        assert (await stream_once(rack.url, tokens=3)).fault is None
        assert rack.supervisor.replicas[1].state is State.READY


@pytest.mark.fault(
    "engine ignores SIGTERM and forks into another session", "every process is ended before `stopped` is said"
)
async def test_stop_in_mid_load_leaves_nothing(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"load_s": 30, "ignore_sigterm": True, "grandchild_setsid": True}]) as rack:
        await rack.until(lambda: rack.supervisor.replicas[0].state is State.LOADING)
    assert not left_of(tmp_path)


@pytest.mark.fault("two `serve` of the same file", "the second is refused and names the first")
async def test_second_supervisor_of_the_same_rack_is_refused(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]):
        with pytest.raises(UsageError, match=f"already running \\(process {os.getpid()}\\)"):
            await fake_rack.build(tmp_path, [{}]).start()


async def test_taken_port_is_refused_with_its_holder_before_anything_starts(tmp_path: Path) -> None:
    async with running_rack(tmp_path / "a", [{}]) as rack:
        other = fake_rack.build(tmp_path / "b", [{}])
        other.gateways.settings = replace(other.gateways.settings, port=rack.supervisor.gateways.port)
        with pytest.raises(ConfigError, match=r"`gateway.port`: .* Address already in use"):
            await other.start()
        assert not left_of(tmp_path / "b")
