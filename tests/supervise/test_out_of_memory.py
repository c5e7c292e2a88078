"""An engine that runs out of memory is started again with less, whenever it happens; the journal tells each step."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llamarack.errors import EngineError
from llamarack.supervise.admin import ask
from llamarack.supervise.journal import read_entries
from llamarack.supervise.state import State
from tests import fake_rack
from tests.supervise.asking import many, stream_once
from tests.supervise.conftest import DEADLINE_S, RunningRack, left_of, rack_process, running_rack, until_http_ready
from tests.supervise.oom_cgroup import memory_cgroup

pytestmark = pytest.mark.process
# The fake needs 100 x batch + slots x context + its file: 51,200 + 4 x 4,096 + 4 as asked.
SIZES: dict[str, Any] = {"slots": 4, "context_tokens": 4096}


def _steps(rack: RunningRack) -> list[str]:
    return [entry.data["setting"] for entry in rack.supervisor.journal.recent if entry.kind == "degraded"]


async def test_at_start_each_rung_is_taken_journalled_and_shown(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{**SIZES, "memory": 12_900 + 2 * 2048}], restarts={"max": 0}) as rack:
        await rack.until_ready()
        assert _steps(rack) == ["batch_tokens", "context_tokens", "sequences"]
        assert rack.kinds().count("start_failed") == 3
        row = (await ask(rack.supervisor.paths, {"op": "status"}))["models"][0]["replicas"][0]
        assert (row["slots_total"], row["context_tokens"]) == (2, 2048)
        asked = row["degraded_from"]
        assert (asked["sequences"], asked["context_tokens"], asked["batch_tokens"]) == (4, 4096, 512)
        assert [step["setting"] for step in asked["steps"]] == _steps(rack)
        await until_http_ready(rack.url)
        assert (await stream_once(rack.url, tokens=3)).fault is None
        table = rack.supervisor.table().replicas[0]
        assert (table.slots, table.context_tokens) == (2, 2048)  # what the gateway admits by
    assert not left_of(tmp_path)


async def test_at_the_first_request(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{**SIZES, "memory": 12_900 + 4 * 4096, "memory_ends": "request"}]) as rack:
        await rack.until_ready()
        assert _steps(rack) == ["batch_tokens"]


async def test_under_load_what_had_not_begun_is_answered_by_the_smaller_plan(tmp_path: Path) -> None:
    faults = {**SIZES, "memory": 12_900 + 4 * 4096, "memory_ends": "load", "prefill_s": 0.3}
    async with running_rack(tmp_path, [faults]) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        assert _steps(rack) == []
        outcomes = await many(rack.url, 3, tokens=5)
        assert [outcome.fault for outcome in outcomes] == [None] * 3
        assert _steps(rack) == ["batch_tokens"]


async def test_coarser_file_is_the_last_rung(tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"x" * 90_000)
    (tmp_path / "small.gguf").write_bytes(b"x" * 10_000)
    faults = {**SIZES, "memory": 60_000, "fallbacks": [tmp_path / "small.gguf"]}
    async with running_rack(tmp_path, [faults]) as rack:
        await rack.until_ready()
        assert _steps(rack) == ["batch_tokens", "context_tokens", "sequences", "path"]
        assert rack.supervisor.replicas[0].spec.path.name == "small.gguf"


async def test_ladder_that_ends_is_told_and_nothing_is_started_again(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}, {**SIZES, "memory": 1}]) as rack:
        hungry = rack.supervisor.replicas[1]
        await rack.until(lambda: hungry.state is State.FAILED)
        assert rack.kinds().count("start_failed") == 4
        told = [entry.message for entry in rack.supervisor.journal.recent if entry.kind == "failed"]
        assert told == ["out of memory, and no smaller plan is left; not started again"]
        assert rack.supervisor.replicas[0].state is State.READY


async def test_fail_stops_at_once(tmp_path: Path) -> None:
    rack = RunningRack(fake_rack.build(tmp_path, [{**SIZES, "memory": 1, "on_out_of_memory": "fail"}]))
    await rack.start()
    assert rack.running is not None
    with pytest.raises(EngineError, match="could not get the memory"):
        await asyncio.wait_for(rack.running, DEADLINE_S)
    assert rack.kinds().count("start_failed") == 1
    await rack.stop()


async def test_heir_of_a_killed_supervisor_takes_the_smaller_engine_back_as_it_is(tmp_path: Path) -> None:
    replicas = [{**SIZES, "memory": 12_900 + 4 * 4096}]
    paths = fake_rack.paths_in(tmp_path)
    async with rack_process(tmp_path, replicas) as (_, first):
        before = (await ask(paths, {"op": "status"}))["models"][0]["replicas"][0]
        first.kill()
        first.wait()
        async with rack_process(tmp_path, replicas):
            after = (await ask(paths, {"op": "status"}))["models"][0]["replicas"][0]
            assert after["pid"] == before["pid"]
            assert after["degraded_from"] == before["degraded_from"]
            assert [step["setting"] for step in after["degraded_from"]["steps"]] == ["batch_tokens"]
    assert not left_of(tmp_path)


async def test_kill_by_the_hosts_out_of_memory_killer_names_ram_and_not_the_card(tmp_path: Path) -> None:
    paths = fake_rack.paths_in(tmp_path)
    with memory_cgroup(600 * 1024**2) as group:
        join = f"echo $$ > {group}/cgroup.procs"
        async with rack_process(tmp_path, [SIZES], before=join) as (port, _):
            url = f"http://127.0.0.1:{port}"
            await until_http_ready(url)
            # The request dies with the engine, is tried on the next one, and that dies as well.
            await stream_once(url, tokens=3, directive="[[fault leak_mib=2000]]")
            entries = read_entries(paths.events, 100)
            died = next(entry for entry in entries if entry.kind == "died")
            assert died.data["cause"] == "host_out_of_memory"
            assert "out-of-memory killer: the cgroup's limit of 600 MiB is used up" in died.message
            assert "RAM" in died.data["hint"]
            assert "the card is not at fault" in died.data["hint"]
            # A model on the processor lives in that RAM, so a smaller plan helps.
            assert next(entry.data["setting"] for entry in entries if entry.kind == "degraded") == "batch_tokens"
    assert not left_of(tmp_path)
