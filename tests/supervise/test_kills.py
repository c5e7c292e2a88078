"""Kills at random moments: whatever is hit, nothing is left behind and the rack comes back.

Short form here; `LLAMARACK_KILLS=200` runs the long one (`make proof-kills`).
"""

import asyncio
import dataclasses
import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from tests.supervise.asking import Outcome, stream_once
from tests.supervise.conftest import RunningRack, left_of, running_rack

pytestmark = pytest.mark.process
KILLS = int(os.environ.get("LLAMARACK_KILLS", "12"))
SEED = 20261130


def _victims(rack: RunningRack) -> list[int]:
    """Everything of the rack that can be hit: engines, gateways and the keepers of both."""
    children = [replica.child for replica in rack.supervisor.replicas if replica.child is not None]
    children += rack.supervisor.gateways.children.values()
    pids = [pid for child in children if child.exit is None for pid in (child.pid, child.keeper_pid)]
    return [pid for pid in pids if pid is not None]


def _open_descriptors() -> int:
    return psutil.Process().num_fds()


async def _ask_until(stop: asyncio.Event, rack: RunningRack, outcomes: list[Outcome]) -> None:
    while not stop.is_set():
        outcomes.append(await stream_once(rack.url, tokens=10))
        await asyncio.sleep(0.01)


async def test_kills_at_random_moments_leave_nothing_behind(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    async with running_rack(
        tmp_path, [{"token_interval_s": 0.01, "load_s": 0.05}] * 3, restarts={"max": 10_000, "window_s": 600}
    ) as rack:
        # The growing wait after a death is another test's business.
        rack.supervisor.restarts = dataclasses.replace(rack.supervisor.restarts, longest_wait_s=0.05)
        await rack.until_ready()
        before = _open_descriptors()
        stop = asyncio.Event()
        outcomes: list[Outcome] = []
        asking = [asyncio.create_task(_ask_until(stop, rack, outcomes)) for _ in range(4)]
        for _ in range(KILLS):
            await asyncio.sleep(chance.random() * 0.3)
            victims = _victims(rack)
            if victims:
                try:
                    os.kill(chance.choice(victims), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        stop.set()
        await asyncio.gather(*asking)
        await rack.until_ready()
        assert any(outcome.fault is None for outcome in outcomes)
        assert _open_descriptors() <= before + 2  # the gateway's link may just be reconnecting
    assert not left_of(tmp_path)
