"""A change of a real rack of fake engines under traffic: real supervisor, keepers, gateway; not one request is lost.

Short form here; `LLAMARACK_RELOADS=10` runs the long one (`make proof-reloads`).
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llamarack.config import plain
from llamarack.errors import DoesNotFit, HardwareError, UsageError
from llamarack.supervise.admin import ask
from llamarack.supervise.canary import Trial
from llamarack.supervise.change import Outcome as Ended
from llamarack.supervise.generation import named
from llamarack.supervise.journal import Entry, read_entries
from llamarack.supervise.state import State
from llamarack.supervise.supervisor import Source
from tests import fake_rack
from tests.supervise.asking import Outcome, stream_once
from tests.supervise.conftest import (
    DEADLINE_S,
    RunningRack,
    left_of,
    port_of,
    running_rack,
    start_process,
    until_http_ready,
)

pytestmark = pytest.mark.process
RELOADS = int(os.environ.get("LLAMARACK_RELOADS", "2"))
STREAMS = 16
_MIB = 1024**2


@contextlib.asynccontextmanager
async def traffic(url: str, streams: int, **options: Any) -> AsyncIterator[list[Outcome]]:
    """Streams that ask again as soon as they were answered; what came of them, complete on leaving."""
    outcomes: list[Outcome] = []
    over = asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            outcomes.append(await stream_once(url, **options))

    clients = [asyncio.create_task(client()) for _ in range(streams)]
    try:
        yield outcomes
    finally:
        over.set()
        await asyncio.gather(*clients)


async def _reload(rack: RunningRack, replicas: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    sections = options.pop("sections", {})
    deployment = fake_rack.deployment_of(rack.supervisor.paths.folder.parents[1], replicas, **sections)
    return await rack.supervisor.reload(deployment, **options)


async def _ended(rack: RunningRack) -> Ended:
    change = rack.supervisor.change
    assert change is not None
    async with asyncio.timeout(3 * DEADLINE_S):
        await change.done.wait()
    return change.outcome


def _ids(rack: RunningRack) -> list[str]:
    return [replica.id for replica in rack.supervisor.replicas]


def _most_loading(entries: list[Entry]) -> int:
    """Loads at once at the worst moment, by the journal."""
    loading: set[str | None] = set()
    most = 0
    for entry in entries:
        if entry.kind == "starting":
            loading.add(entry.replica)
        elif entry.kind in {"ready", "start_failed", "stopped"}:
            loading.discard(entry.replica)
        most = max(most, len(loading))
    return most


async def test_rolling_reloads_under_streams_lose_not_one_request(tmp_path: Path) -> None:
    replicas = [{"token_interval_s": 0.01, "load_s": 0.2, "slots": 16}] * 2
    async with running_rack(tmp_path, replicas) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        before = {replica.child.pid for replica in rack.supervisor.replicas if replica.child}
        began = time.monotonic()
        async with traffic(rack.url, STREAMS, tokens=20) as outcomes:
            for number in range(RELOADS):
                told = await _reload(rack, replicas, restart=True)
                assert len(told["steps"]) == 4
                assert await _ended(rack) is Ended.DONE
                assert _ids(rack) == [f"fake-0-g{number + 2}", f"fake-1-g{number + 2}"]
        failed = [outcome.fault for outcome in outcomes if outcome.fault]
        if result := os.environ.get("LLAMARACK_RELOADS_RESULT"):
            found = {"reloads": RELOADS, "streams": STREAMS, "requests": len(outcomes), "failed": len(failed)}
            Path(result).write_text(json.dumps({**found, "seconds": round(time.monotonic() - began, 1)}) + "\n")
        assert failed == []
        assert len(outcomes) > STREAMS
        after = {replica.child.pid for replica in rack.supervisor.replicas if replica.child}
        assert not before & after
        assert _most_loading(read_entries(rack.supervisor.paths.events, 10_000)) == 1
        logs = {path.stem for path in rack.supervisor.paths.logs.iterdir() if path.name.startswith("fake-")}
        newest = {named(f"fake-{place}", generation) for place in (0, 1) for generation in (RELOADS, RELOADS + 1)}
        assert logs <= newest  # those of earlier changes are gone
    assert not left_of(tmp_path)


@pytest.mark.fault("two racks on one machine", "one load at a time across both")
async def test_two_racks_on_one_machine_load_one_at_a_time(tmp_path: Path) -> None:
    one, two = ([{"model": name, "load_s": 0.3}] * 2 for name in ("one", "two"))
    async with running_rack(tmp_path / "one", one) as first, running_rack(tmp_path / "two", two) as second:
        await first.until_ready()
        await second.until_ready()
        await _reload(first, one, restart=True)
        await _reload(second, two, restart=True)
        assert [await _ended(first), await _ended(second)] == [Ended.DONE, Ended.DONE]
        entries = [*first.supervisor.journal.recent, *second.supervisor.journal.recent]
        assert _most_loading(sorted(entries, key=lambda entry: entry.time_unix_s)) == 1
    assert not left_of(tmp_path)


async def test_of_two_changes_at_once_one_is_refused(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        both = [_reload(rack, [{}], restart=True) for _ in range(2)]
        answers = await asyncio.gather(*both, return_exceptions=True)
        assert [type(answer) for answer in answers] == [dict, UsageError]
        assert await _ended(rack) is Ended.DONE
        assert _ids(rack) == ["fake-0-g2"]


@pytest.mark.fault("NVIDIA's driver stalls in the middle of a change", "the change goes back, everything serves on")
async def test_driver_that_does_not_answer_brings_a_change_back_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stalled() -> dict[int, int]:
        raise HardwareError("NVIDIA's driver did not answer within 20 s", hint="dmesg")

    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        await _reload(rack, [{"pings": True}])
        monkeypatch.setattr(rack.supervisor, "free_bytes", stalled)
        assert await _ended(rack) is Ended.ROLLED_BACK
        assert rack.supervisor.change is not None
        record = rack.supervisor.change.record()
        assert ("did not answer" in record["message"], record["exit_code"]) == (True, 3)
        assert _ids(rack) == ["fake-0"]
        assert (await stream_once(rack.url, tokens=3)).fault is None
    assert not left_of(tmp_path)


async def test_swap_releases_the_old_model_first_where_both_do_not_fit(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"model": "old"}]) as rack:
        _limit(rack, 100 * _MIB)  # a fake engine is planned with 64 MiB
        await rack.until_ready()
        await _reload(rack, [{"model": "new"}])
        assert await _ended(rack) is Ended.DONE
        assert _ids(rack) == ["new-0-g2"]
        kinds = [(entry.kind, entry.replica) for entry in rack.supervisor.journal.recent]
        assert kinds.index(("stopped", "old-0")) < kinds.index(("starting", "new-0-g2"))
        await _serves(rack, "new", "old")
    assert not left_of(tmp_path)


async def test_swap_goes_side_by_side_where_both_fit(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"model": "old"}]) as rack:
        _limit(rack, 130 * _MIB)
        await rack.until_ready()
        await _reload(rack, [{"model": "new"}])
        assert await _ended(rack) is Ended.DONE
        kinds = [(entry.kind, entry.replica) for entry in rack.supervisor.journal.recent]
        assert kinds.index(("ready", "new-0-g2")) < kinds.index(("stopped", "old-0"))
        await _serves(rack, "new", "old")


async def test_failed_new_model_brings_the_released_old_one_back(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"model": "old"}]) as rack:
        _limit(rack, 100 * _MIB)
        await rack.until_ready()
        await _reload(
            rack,
            [{"model": "new", "crash_in_load": True, "load_error": "data is not within the file bounds"}],
            source=Source(path=tmp_path / "new.yaml"),
        )
        assert await _ended(rack) is Ended.ROLLED_BACK
        assert _ids(rack) == ["old-0"]
        await _serves(rack, "old", "new")
        record = await ask(rack.supervisor.paths, {"op": "status"})
        assert record["source"] != {"path": str(tmp_path / "new.yaml"), "host": None, "port": None}  # not what serves
        assert record["generation"] == 1
        assert record["change"]["exit_code"] == 5
        assert "new-0-g2 did not become ready: the model file is damaged" in record["change"]["message"]
        assert [model["name"] for model in record["models"]] == ["old"]
    assert not left_of(tmp_path)


async def test_new_replica_that_never_warms_up_costs_nothing(tmp_path: Path) -> None:
    sound = {"token_interval_s": 0.01, "slots": 8}
    async with running_rack(tmp_path, [sound] * 2) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        before = [replica.child for replica in rack.supervisor.replicas]
        async with traffic(rack.url, 8, tokens=10) as outcomes:
            await _reload(rack, [{**sound, "garbage": True}] * 2)
            assert await _ended(rack) is Ended.ROLLED_BACK
        assert [outcome.fault for outcome in outcomes if outcome.fault] == []
        assert [replica.child for replica in rack.supervisor.replicas] == before
        assert rack.kinds().count("starting") == 3  # one new one was enough to know


async def test_failure_of_the_second_new_replica_takes_the_first_one_back_too(tmp_path: Path) -> None:
    sound = {"token_interval_s": 0.01, "slots": 8}
    async with running_rack(tmp_path, [sound] * 2) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        async with traffic(rack.url, 8, tokens=10) as outcomes:
            await _reload(rack, [{**sound, "pings": True}, {**sound, "crash_in_load": True}])
            assert await _ended(rack) is Ended.ROLLED_BACK
        assert [outcome.fault for outcome in outcomes if outcome.fault] == []
        assert sorted(_ids(rack)) == ["fake-0", "fake-1"]
        assert all(replica.state is State.READY for replica in rack.supervisor.replicas)
        assert not any("pings" in replica.spec.fingerprint for replica in rack.supervisor.replicas)


async def test_what_the_edit_does_not_touch_stays(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"model": "a"}, {"model": "b"}]) as rack:
        await rack.until_ready()
        a = rack.supervisor.replicas[0].child
        told = await _reload(rack, [{"model": "a"}, {"model": "b"}])
        assert told["unchanged"]
        assert rack.supervisor.change is None
        told = await _reload(rack, [{"model": "a"}, {"model": "b", "pings": True}, {"model": "b"}], dry_run=True)
        assert told["steps"] == ["start b-0-g2"]  # `b-0` is what the second one of b asks for
        assert rack.supervisor.change is None
        await _reload(rack, [{"model": "a"}, {"model": "b", "pings": True}])
        assert await _ended(rack) is Ended.DONE
        assert rack.supervisor.replicas[0].child is a
        assert _ids(rack) == ["a-0", "b-0-g2"]


async def test_failed_replica_is_started_again(tmp_path: Path) -> None:
    lacks_file = {"crash_in_load": True, "load_error": "unknown model architecture: 'mamba9'"}
    async with running_rack(tmp_path, [{}, lacks_file]) as rack:
        await rack.until(lambda: [r.state for r in rack.supervisor.replicas] == [State.READY, State.FAILED])
        await _reload(rack, [{}, {}])
        assert await _ended(rack) is Ended.DONE
        assert _ids(rack) == ["fake-0", "fake-1-g2"]
        assert all(replica.state is State.READY for replica in rack.supervisor.replicas)


async def test_one_change_at_a_time_and_it_can_be_taken_back(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        await _reload(rack, [{"load_s": 3600}])
        await rack.until(lambda: len(rack.supervisor.replicas) == 2)
        with pytest.raises(UsageError, match="changing to generation 2 already"):
            await _reload(rack, [{"pings": True}])
        record = await ask(rack.supervisor.paths, {"op": "status"})
        assert (record["change"]["outcome"], record["change"]["now"]) == ("running", "starts fake-0-g2")
        assert [row["generation"] for row in record["models"][0]["replicas"]] == [1, 2]
        assert (await ask(rack.supervisor.paths, {"op": "abort"}))["running"]
        assert await _ended(rack) is Ended.ROLLED_BACK
        assert _ids(rack) == ["fake-0"]
    assert not left_of(tmp_path)


async def test_stop_in_the_middle_of_a_change_leaves_nothing(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        await _reload(rack, [{"load_s": 3600, "ignore_sigterm": True}])
        await rack.until(lambda: len(rack.supervisor.replicas) == 2)
    assert not left_of(tmp_path)


async def test_what_does_not_fit_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        _limit(rack, 100 * _MIB)
        await rack.until_ready()
        with pytest.raises(DoesNotFit, match=r"fake-1-g2 needs 64\.0 MiB on the host, 36\.0 MiB are free"):
            await _reload(rack, [{}, {"pings": True}, {"pings": True}])
        assert rack.supervisor.change is None


async def test_limits_of_the_gateway_change_while_it_serves(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{"token_interval_s": 0.01}]) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        slow = "[[fault prefill_s=20]]"
        worker = rack.supervisor.gateways.children[0]
        await _reload(rack, [{"token_interval_s": 0.01}], sections={"gateway": {"request_timeout_s": 0.5}})
        assert await _ended(rack) is Ended.DONE
        await rack.until(lambda: rack.supervisor.gateways.settings.request_timeout_s == 0.5)
        outcome = await stream_once(rack.url, tokens=3, directive=slow)
        assert outcome.fault is not None
        assert "HTTP 504" in outcome.fault or outcome.fault == "error event"  # a slow machine commits before
        assert rack.supervisor.gateways.children[0] is worker
        with pytest.raises(UsageError, match=r"`gateway\.workers` is `1`, `2` in the file"):
            await _reload(rack, [{}], sections={"gateway": {"workers": 2}})
        with pytest.raises(UsageError, match=r"`supervise\.webhook` is `null`, `http://127.0.0.1:9/` in the file"):
            await _reload(rack, [{}], sections={"supervise": {"webhook": "http://127.0.0.1:9/"}})


# -- trials -------------------------------------------------------------------------------------------------------


async def _try_out(tmp_path: Path, new: dict[str, Any], for_s: float, streams: int = 8) -> tuple[RunningRack, Ended]:
    sound = {"token_interval_s": 0.001, "slots": 8}
    async with running_rack(tmp_path, [sound] * 2) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        async with traffic(rack.url, streams, tokens=4) as outcomes:
            await _reload(rack, [{**sound, "pings": True, **new}] * 2, trial=Trial(share=0.25, for_s=for_s))
            ended = await _ended(rack)
        if not new:
            assert [outcome.fault for outcome in outcomes if outcome.fault] == []
    return rack, ended


async def test_good_trial_gets_its_share_and_rolls_on(tmp_path: Path) -> None:
    rack, ended = await _try_out(tmp_path, {}, for_s=4)
    assert ended is Ended.DONE
    change = rack.supervisor.change
    assert change is not None
    tallies = change.record()["trial"]["tallies"]
    seen = tallies["fake-0-g2"]["requests"]
    assert seen / (seen + tallies["others"]["requests"]) == pytest.approx(0.25, abs=0.05)
    assert "trial_passed" in rack.kinds()


async def test_trial_that_fails_goes_back_before_its_time(tmp_path: Path) -> None:
    rack, ended = await _try_out(tmp_path, {"refuse": 500, "spare_requests": 2}, for_s=3600)
    assert ended is Ended.ROLLED_BACK
    change = rack.supervisor.change
    assert change is not None
    assert change.failure is not None
    assert change.failure.exit_code == 6
    assert "worse than what it replaces: " in change.failure.message


async def test_trial_that_is_slower_goes_back(tmp_path: Path) -> None:
    rack, ended = await _try_out(tmp_path, {"prefill_s": 0.5, "spare_requests": 2}, for_s=10)
    change = rack.supervisor.change
    assert change is not None
    assert change.failure is not None
    assert ended is Ended.ROLLED_BACK
    assert "first token after" in change.failure.message
    assert change.failure.exit_code == 6


async def test_trial_that_nobody_used_is_not_called_good(tmp_path: Path) -> None:
    rack, ended = await _try_out(tmp_path, {}, for_s=1, streams=0)
    change = rack.supervisor.change
    assert change is not None
    assert change.failure is not None
    assert ended is Ended.ROLLED_BACK
    assert change.failure.exit_code == 7


# -- a supervisor that dies -----------------------------------------------------------------------------------------


async def _ask_reload(folder: Path, replicas: list[dict[str, Any]]) -> None:
    request = {
        "op": "reload",
        "deployment": plain(fake_rack.deployment_of(folder, replicas)),
        "source": {"path": str(folder / "fake.yaml"), "host": None, "port": None},
        "restart": False,
        "trial": None,
        "dry_run": False,
    }
    await ask(fake_rack.paths_in(folder), request)


async def _until_state(folder: Path, replica: str, *states: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            record = await ask(fake_rack.paths_in(folder), {"op": "status"})
            rows = [row for model in record["models"] for row in model["replicas"]]
            if any(row["id"] == replica and row["state"] in states for row in rows):
                return
            await asyncio.sleep(0.02)


async def test_supervisor_killed_in_the_middle_of_a_change_is_followed_by_one_that_ends_it(tmp_path: Path) -> None:
    old: list[dict[str, Any]] = [{"token_interval_s": 0.01, "slots": 8}] * 2
    new: list[dict[str, Any]] = [{"token_interval_s": 0.01, "slots": 8, "load_s": 1.0}] * 2
    first = start_process(tmp_path, old)
    port = await port_of(first)
    url = f"http://127.0.0.1:{port}"
    await until_http_ready(url)
    paths = fake_rack.paths_in(tmp_path)
    async with traffic(url, 8, tokens=10) as outcomes:
        await _ask_reload(tmp_path, new)
        await _until_state(tmp_path, "fake-1-g2", "loading")  # the first is replaced, the second is not
        first.send_signal(signal.SIGKILL)
        await asyncio.to_thread(first.wait, DEADLINE_S)
        second = start_process(tmp_path, new)
        assert await port_of(second) == port
        record = await ask(paths, {"op": "status"})
    await _end(first, second)
    assert [outcome.fault for outcome in outcomes if outcome.fault] == []
    rows = record["models"][0]["replicas"]
    assert [row["id"] for row in rows] == ["fake-0-g2", "fake-1-g2"]
    assert {row["state"] for row in rows} == {"ready"}
    entries = read_entries(paths.events, 1000)
    assert "change_resumed" in [entry.kind for entry in entries]
    assert [entry.replica for entry in entries if entry.kind == "starting"].count("fake-0-g2") == 1  # taken back
    assert not left_of(tmp_path)


async def test_broken_off_swap_whose_new_model_fails_brings_the_old_one_back(tmp_path: Path) -> None:
    old: list[dict[str, Any]] = [{"model": "old"}]
    new: list[dict[str, Any]] = [{"model": "new", "load_s": 2.0, "crash_in_load": True}]
    first = start_process(tmp_path, old, room_bytes=100 * _MIB)
    await port_of(first)
    paths = fake_rack.paths_in(tmp_path)
    await _ask_reload(tmp_path, new)
    await _until_state(tmp_path, "new-0-g2", "loading")
    first.send_signal(signal.SIGKILL)
    await asyncio.to_thread(first.wait, DEADLINE_S)
    second = start_process(tmp_path, new, room_bytes=100 * _MIB)
    await port_of(second)
    record = await ask(paths, {"op": "status"})
    await _end(first, second)
    assert record["change"]["outcome"] == "rolled_back"
    ready = {model["name"]: [row["state"] for row in model["replicas"]] for model in record["models"]}
    assert ready["old"] == ["ready"]


# -- helpers --------------------------------------------------------------------------------------------------------


async def _end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.terminate()
        await asyncio.to_thread(process.wait, DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()


def _limit(rack: RunningRack, room_bytes: int) -> None:
    assert isinstance(rack.supervisor, fake_rack.FakeSupervisor)
    rack.supervisor.room_bytes = room_bytes


async def _serves(rack: RunningRack, name: str, gone: str) -> None:
    """Clients get an answer from `name` and a 404 for `gone`."""
    await until_http_ready(rack.url)
    async with aiohttp.ClientSession() as session:
        for model, status in ((name, 200), (gone, 404)):
            body = {"model": model, "prompt": "x", "max_tokens": 2}
            async with session.post(f"{rack.url}/v1/completions", data=json.dumps(body)) as response:
                assert response.status == status, await response.text()
