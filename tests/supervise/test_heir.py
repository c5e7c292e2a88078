"""A supervisor that is killed, and the next one of the same rack."""

import asyncio
from pathlib import Path

import psutil
import pytest

from llamarack.supervise.admin import ask
from llamarack.supervise.journal import read_entries
from tests import fake_rack
from tests.supervise.asking import many, stream_once
from tests.supervise.conftest import (
    DEADLINE_S,
    left_of,
    port_of,
    start_process,
    until_http_ready,
)

pytestmark = pytest.mark.process


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
