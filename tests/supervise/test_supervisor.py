"""A real supervisor with real keepers, a real gateway worker and fake engines."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from llamarack.engine.adaptor import Launch, LaunchContext
from llamarack.errors import ConfigError, EngineError, UsageError
from llamarack.supervise import replica as replica_module
from llamarack.supervise.admin import ask
from llamarack.supervise.journal import read_entries
from llamarack.supervise.state import State
from tests import fake_rack
from tests.fake_adaptor import FakeEngine
from tests.supervise.asking import many, stream_once
from tests.supervise.conftest import (
    DEADLINE_S,
    RunningRack,
    left_of,
    port_of,
    running_rack,
    start_process,
    until_http_ready,
)
from tests.supervise.faults import Fault

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


async def test_rack_is_settled_once_its_gateway_lets_requests_in(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        gateway = rack.supervisor.gateways.children[0]
        assert gateway.pid is not None
        os.kill(gateway.pid, signal.SIGSTOP)  # slower than any engine
        settled = asyncio.create_task(rack.supervisor.until_settled())
        await rack.until_ready()
        record = await ask(rack.supervisor.paths, {"op": "status"})
        assert not settled.done()
        assert not record["gateway"]["is_current"]
        os.kill(gateway.pid, signal.SIGCONT)
        async with asyncio.timeout(DEADLINE_S):
            assert await settled
        assert (await stream_once(rack.url, tokens=3)).fault is None  # without asking /ready
        record = await ask(rack.supervisor.paths, {"op": "status"})
        assert record["gateway"]["is_current"]


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


@pytest.mark.fault("gateway killed -9", "started again on the same port, engines stay")
async def test_killed_gateway_is_restarted_on_the_same_port_and_engines_stay(tmp_path: Path, fault: Fault) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        engine = rack.supervisor.replicas[0].child
        gateway = rack.supervisor.gateways.children[0]
        assert gateway.pid is not None
        os.kill(gateway.pid, signal.SIGKILL)
        fault.strikes()
        await rack.until(lambda: "gateway_died" in rack.kinds() and rack.supervisor.gateways.children[0] is not gateway)
        await until_http_ready(rack.url)
        fault.is_over()
        assert (await stream_once(rack.url, tokens=3)).fault is None
        assert rack.supervisor.replicas[0].child is engine


@pytest.mark.fault("gateway that cannot be started, or dies at once", "tried again, ever less often; engines stay")
async def test_gateway_is_tried_again_until_it_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        engine = rack.supervisor.replicas[0].child

        def told() -> list[str]:
            return [each.message for each in rack.supervisor.journal.recent if each.kind == "gateway_died"]

        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/nowhere/python")  # as in the middle of an upgrade
            gateway = rack.supervisor.gateways.children[0]
            assert gateway.pid is not None
            os.kill(gateway.pid, signal.SIGKILL)
            await rack.until(lambda: any("cannot be started" in each for each in told()))
            broken.undo()
            broken.setenv("PYTHONHOME", "/nowhere")  # it ends before its first line; a keeper takes no notice
            await rack.until(lambda: sum("exit code 1; started again" in each for each in told()) >= 2)
        waits = [each.rpartition(" in ")[2] for each in told() if "exit code 1" in each]
        assert len(set(waits)) == len(waits)  # each longer than the one before
        await until_http_ready(rack.url)
        assert (await stream_once(rack.url, tokens=3)).fault is None
        assert rack.supervisor.replicas[0].child is engine
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
        other.gateways.settings = other.gateways.settings.model_copy(update={"port": rack.supervisor.gateways.port})
        with pytest.raises(ConfigError, match=r"`gateway.port`: .* Address already in use"):
            await other.start()
        assert not left_of(tmp_path / "b")


@pytest.mark.fault("supervisor killed -9", "gateway and engines serve on; the next supervisor takes them back")
async def test_killed_supervisor_loses_nothing_and_its_heir_reloads_nothing(tmp_path: Path) -> None:
    replicas: list[dict[str, object]] = [{"token_interval_s": 0.02}] * 2
    first = start_process(tmp_path, replicas)
    port = await port_of(first)
    url = f"http://127.0.0.1:{port}"
    await until_http_ready(url)
    paths = fake_rack.paths_in(tmp_path)
    before = await ask(paths, {"op": "status"})
    asked = asyncio.create_task(many(url, 8, tokens=100))
    await asyncio.sleep(0.5)
    first.kill()
    first.wait()
    assert first.stdout is not None
    first.stdout.close()
    assert (await stream_once(url, tokens=3)).fault is None  # also without any supervisor
    second = start_process(tmp_path, replicas)
    try:
        assert await port_of(second) == port
        assert [outcome.fault for outcome in await asked] == [None] * 8
        after = await ask(paths, {"op": "status"})
        assert _pids(after) == _pids(before)
        assert [entry.kind for entry in read_entries(paths.events, 50)].count("adopted") == 3
    finally:
        second.terminate()
        await asyncio.to_thread(second.wait, DEADLINE_S)
        assert second.stdout is not None
        second.stdout.close()
    assert not left_of(tmp_path)


async def test_heir_with_other_settings_ends_the_old_engine_and_starts_a_new_one(tmp_path: Path) -> None:
    first = start_process(tmp_path, [{}])
    await port_of(first)
    paths = fake_rack.paths_in(tmp_path)
    before = await ask(paths, {"op": "status"})
    first.kill()
    first.wait()
    assert first.stdout is not None
    first.stdout.close()
    second = start_process(tmp_path, [{"pings": True}])
    try:
        await port_of(second)
        after = await ask(paths, {"op": "status"})
        old, new = _pids(before)[0], _pids(after)[0]
        assert old != new
        assert old is not None
        assert not psutil.pid_exists(old)
    finally:
        second.terminate()
        await asyncio.to_thread(second.wait, DEADLINE_S)
        assert second.stdout is not None
        second.stdout.close()


def _pids(record: dict[str, list[dict[str, list[dict[str, int]]]]]) -> list[int | None]:
    return [row["pid"] for model in record["models"] for row in model["replicas"]]
