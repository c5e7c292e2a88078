"""Engines that die: started again or given up, told with their cause, and nobody else's concern."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llamarack.engine.adaptor import Launch, LaunchContext
from llamarack.errors import EngineError
from llamarack.supervise import replica as replica_module
from llamarack.supervise.admin import ask
from llamarack.supervise.state import State
from tests import fake_rack
from tests.fake_adaptor import FakeEngine
from tests.supervise.asking import stream_once
from tests.supervise.conftest import (
    DEADLINE_S,
    RunningRack,
    left_of,
    running_rack,
    until_http_ready,
)
from tests.supervise.faults import Fault

pytestmark = pytest.mark.process


@pytest.mark.fault("engine killed -9", "started again; only what had begun to stream is lost, with an error event")
async def test_killed_engine_is_restarted_and_only_what_had_streamed_is_lost(tmp_path: Path, fault: Fault) -> None:
    async with running_rack(tmp_path, [{"token_interval_s": 0.02}] * 2) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        streaming = [asyncio.create_task(stream_once(rack.url, tokens=60)) for _ in range(4)]
        silent = [
            asyncio.create_task(stream_once(rack.url, tokens=5, directive="[[fault prefill_s=1.5]]")) for _ in range(4)
        ]
        await rack.until(lambda: sum(sum(c.in_flight.values()) for c in rack.supervisor.gateways.counts.values()) == 8)
        await asyncio.sleep(0.3)  # some events of the first four are out
        victim = rack.supervisor.replicas[0]
        assert victim.child is not None
        assert victim.child.pid is not None
        os.kill(victim.child.pid, signal.SIGKILL)
        fault.strikes()
        await rack.until(lambda: "died" in rack.kinds())
        fault.is_found()
        outcomes = await asyncio.gather(*streaming)
        assert {outcome.fault for outcome in outcomes} == {None, "error event"}
        assert all(outcome.events > 0 for outcome in outcomes if outcome.fault)
        assert [outcome.fault for outcome in await asyncio.gather(*silent)] == [None] * 4
        await rack.until_ready()
        fault.is_over()
        assert victim.restarts == 1
        assert victim.last_death is not None
        assert victim.last_death.cause == "killed"
        record = await ask(rack.supervisor.paths, {"op": "status"})
        rows = {row["id"]: row for model in record["models"] for row in model["replicas"]}
        assert (rows["fake-0"]["restarts"], rows["fake-1"]["restarts"]) == (1, 0)
        assert rows["fake-0"]["last_death"]["cause"] == "killed"
    assert not left_of(tmp_path)


@pytest.mark.fault("engine dead, one of its ranks slow to end", "no request is sent there from the first moment on")
async def test_engine_whose_rank_is_slow_to_end_gets_no_request_meanwhile(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"grandchild": True}]) as rack:
        await rack.until_ready()
        victim = rack.supervisor.replicas[0]
        seen: list[tuple[State, bool]] = []
        rack.supervisor.on_change.append(lambda: seen.append((victim.state, bool(victim.child and victim.child.exit))))
        assert victim.child is not None
        assert victim.child.pid is not None
        os.kill(victim.child.pid, signal.SIGKILL)
        await rack.until(lambda: "died" in rack.kinds())
        assert seen[0] == (State.BACKOFF, False)  # told before the last of its processes had gone
        assert victim.last_death is not None
        assert victim.last_death.while_state is State.READY
    assert not left_of(tmp_path)


@pytest.mark.fault("keeper of an engine killed -9", "the engine and its ranks end with it, then it is started again")
async def test_engine_whose_keeper_is_killed_is_told_as_that(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        victim = rack.supervisor.replicas[0]
        assert victim.child is not None
        assert victim.child.keeper_pid is not None
        os.kill(victim.child.keeper_pid, signal.SIGKILL)
        await rack.until(lambda: "died" in rack.kinds())
        assert victim.last_death is not None
        assert victim.last_death.cause == "keeper_lost"
        await rack.until_ready()
    assert not left_of(tmp_path)


@pytest.mark.fault("crash loop", "capped by `restarts`, then `failed`; the others serve on")
async def test_crash_loop_ends_in_failed_and_the_other_replica_serves_on(tmp_path: Path) -> None:
    faults = [{}, {"crash_in_load": True, "load_error": "something unheard of"}]
    async with running_rack(tmp_path, faults, restarts={"max": 2, "window_s": 600}) as rack:
        await rack.until(lambda: rack.supervisor.replicas[1].state is State.FAILED)
        assert rack.kinds().count("start_failed") == 3
        await rack.until(lambda: rack.supervisor.replicas[0].state is State.READY)
        await until_http_ready(rack.url)
        assert (await stream_once(rack.url, tokens=3)).fault is None
        status, told = await _ready(rack.url)
        assert (status, told["replicas"]) == (200, {"fake-0": "ready", "fake-1": "failed"})
    assert not left_of(tmp_path)


@pytest.mark.fault("crash loop of a model's every replica", "`/ready` is 503 and names the model; the others serve on")
async def test_model_that_failed_is_named_by_ready_and_the_other_model_serves_on(tmp_path: Path) -> None:
    faults = [{}, {"model": "other", "crash_in_load": True, "load_error": "something unheard of"}]
    async with running_rack(tmp_path, faults, restarts={"max": 1, "window_s": 600}) as rack:
        assert not await asyncio.wait_for(rack.supervisor.until_settled(), DEADLINE_S)
        status, told = await _ready(rack.url)
        assert (status, told["models_not_ready"]) == (503, ["other"])
        assert told["replicas"] == {"fake-0": "ready", "other-0": "failed"}
        assert (await stream_once(rack.url, tokens=3)).fault is None
        assert "HTTP 503" in str((await stream_once(rack.url, tokens=3, model="other")).fault)
    assert not left_of(tmp_path)


async def _ready(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/ready") as response:
        return response.status, await response.json()


@pytest.mark.fault(
    "fault of llamarack's own over one replica", "counts as its death, told in full; the others serve on"
)
async def test_fault_of_our_own_is_one_replicas_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = FakeEngine.launch

    def faulty(engine: FakeEngine, context: LaunchContext) -> Launch:
        if context.replica == "fake-1":
            raise KeyError("x")
        return launch(engine, context)

    monkeypatch.setattr(FakeEngine, "launch", faulty)
    async with running_rack(tmp_path, [{}, {}], restarts={"max": 1, "window_s": 600}) as rack:
        assert not await asyncio.wait_for(rack.supervisor.until_settled(), DEADLINE_S)
        assert [replica.state for replica in rack.supervisor.replicas] == [State.READY, State.FAILED]
        told = [entry for entry in rack.supervisor.journal.recent if entry.kind == "start_failed"]
        assert [entry.data["cause"] for entry in told] == ["internal_error"] * 2
        assert "KeyError" in "".join(told[0].data["traceback"])
        assert (await stream_once(rack.url, tokens=3)).fault is None
    assert not left_of(tmp_path)


@pytest.mark.fault("a process that not even SIGKILL ends", "told, and not started beside itself; the others serve on")
async def test_engine_that_cannot_be_ended_is_told_and_not_started_beside_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "_END_TIMEOUT_S", 0.5)
    async with running_rack(tmp_path, [{}, {}]) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        victim = rack.supervisor.replicas[0]
        assert victim.child is not None
        assert victim.child.keeper_pid is not None
        os.kill(victim.child.keeper_pid, signal.SIGSTOP)  # as if the kernel held what it keeps
        victim.condemn("hung", "no token", None)
        await rack.until(lambda: victim.state is State.FAILED)
        entries = [entry for entry in rack.supervisor.journal.recent if entry.replica == victim.id]
        assert [entry.kind for entry in entries][-3:] == ["not_ended", "died", "failed"]
        assert entries[-1].message == "one of its processes does not end; not started again"
        assert (await stream_once(rack.url, tokens=3)).fault is None
        os.kill(victim.child.keeper_pid, signal.SIGCONT)
    assert not left_of(tmp_path)


async def test_cause_that_the_next_start_meets_again_is_not_tried_again(tmp_path: Path) -> None:
    faults = [{}, {"crash_in_load": True, "load_error": "unknown model architecture: 'mamba9'"}]
    async with running_rack(tmp_path, faults) as rack:
        await rack.until(lambda: rack.supervisor.replicas[1].state is State.FAILED)
        assert rack.kinds().count("start_failed") == 1
        death = rack.supervisor.replicas[1].last_death
        assert death is not None
        assert death.cause == "unsupported_architecture"


async def test_rack_whose_every_start_fails_ends_with_the_cause_and_the_log(tmp_path: Path) -> None:
    rack = RunningRack(
        fake_rack.build(tmp_path, [{"crash_in_load": True, "load_error": "data is not within the file bounds"}])
    )
    await rack.start()
    assert rack.running is not None
    with pytest.raises(EngineError, match="damaged or incomplete") as caught:
        await asyncio.wait_for(rack.running, DEADLINE_S)
    assert "data is not within the file bounds" in str(caught.value)
    assert not [line for line in left_of(tmp_path) if "rack.sock" not in line]
    await rack.stop()


async def test_start_that_fails_before_it_writes_is_not_told_with_the_log_of_the_one_before(tmp_path: Path) -> None:
    supervisor = fake_rack.build(tmp_path, [{}], restarts={"max": 0})
    paths = supervisor.paths
    in_the_way = paths.keeper_socket("fake-0")
    in_the_way.mkdir(parents=True)
    paths.logs.mkdir(parents=True)
    paths.log_of("fake-0").write_text("unknown model architecture: 'mamba9'\n")
    rack = RunningRack(supervisor)
    await rack.start()
    try:
        await rack.until(lambda: "failed" in rack.kinds())
        death = supervisor.replicas[0].last_death
        assert death is not None
        assert (death.cause, death.log_tail) == ("unrecognised", ())
    finally:
        await rack.stop()
        in_the_way.rmdir()
