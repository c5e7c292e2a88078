"""Whole process groups: whatever part of an engine dies, nothing of it is left, and the next start has all it needs."""

import os
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest

from llamarack.supervise.replica import Replica
from tests.supervise.asking import stream_once
from tests.supervise.conftest import left_of, running_rack, until_http_ready
from tests.supervise.faults import Fault

pytestmark = pytest.mark.process


async def _grandchildren(replica: Replica) -> list[int]:
    assert replica.endpoint is not None
    connector = aiohttp.UnixConnector(path=str(replica.endpoint.socket))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get("http://engine/fake/record") as answer,
    ):
        pids: list[int] = (await answer.json())["grandchildren"]
        return pids


@pytest.mark.fault("API process of an engine killed -9, its ranks live", "the whole group is ended, then started again")
async def test_api_process_killed_takes_its_ranks_with_it(tmp_path: Path, fault: Fault) -> None:
    async with running_rack(tmp_path, [{"grandchild": True, "grandchild_setsid": True}]) as rack:
        await rack.until_ready()
        replica = rack.supervisor.replicas[0]
        ranks = await _grandchildren(replica)
        assert len(ranks) == 2
        assert replica.child is not None
        assert replica.child.pid is not None
        os.kill(replica.child.pid, signal.SIGKILL)
        fault.strikes()
        await rack.until(lambda: "died" in rack.kinds())
        fault.is_found()
        assert not [pid for pid in ranks if psutil.pid_exists(pid)]  # before it is started again
        await rack.until(lambda: replica.restarts == 1)
        await rack.until_ready()
        fault.is_over()
    assert not left_of(tmp_path)


@pytest.mark.fault(
    "a rank dies and its engine waits for it", "found by token progress, the whole group is ended and started again"
)
async def test_dead_rank_is_found_by_the_tokens_that_no_longer_come(tmp_path: Path, fault: Fault) -> None:
    async with running_rack(tmp_path, [{"grandchild": True, "needs_grandchild": True}], stuck_request_s=10) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        replica = rack.supervisor.replicas[0]
        (rank,) = await _grandchildren(replica)
        os.kill(rank, signal.SIGKILL)
        await rack.until(lambda: psutil.Process(rank).status() == psutil.STATUS_ZOMBIE)
        fault.strikes()
        outcome = await stream_once(rack.url, tokens=3)
        fault.is_over()
        assert outcome.fault is None
        assert replica.restarts == 1
        assert replica.last_death is not None
        assert replica.last_death.cause == "hung"
    assert not left_of(tmp_path)
