"""The state file of a rack whose disk is full."""

from pathlib import Path

import pytest

from llamarack.supervise import memory_file
from tests.supervise.asking import stream_once
from tests.supervise.conftest import RunningRack, left_of, running_rack, until_http_ready

pytestmark = pytest.mark.process


@pytest.mark.fault("state file that cannot be written", "serves on; told once, and once more when it is right again")
async def test_full_disk_is_told_once_and_the_file_is_right_afterwards(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}, {}]) as rack:
        await rack.until_ready()
        await until_http_ready(rack.url)
        state = rack.supervisor.paths.state
        kept = state.read_bytes()
        fresh = state.with_suffix(".new")
        fresh.symlink_to("/dev/full")
        for restarts in (1, 2):  # several changes each
            await _recycle(rack, restarts)
        assert (await stream_once(rack.url, tokens=3)).fault is None
        assert rack.kinds().count("state_unwritable") == 1
        assert state.read_bytes() == kept  # the older one, whole
        fresh.unlink()
        await _recycle(rack, 3)
        assert rack.kinds().count("state_writable") == 1
        remembered = memory_file.read(state)
        assert remembered is not None
        pids = [replica.child.start_ticks for replica in rack.supervisor.replicas if replica.child is not None]
        assert [each.start_ticks for each in remembered.replicas] == pids
    assert not left_of(tmp_path)


async def _recycle(rack: RunningRack, restarts: int) -> None:
    replica = rack.supervisor.replicas[0]
    replica.ask_recycle("a test")
    await rack.until(lambda: replica.restarts == restarts)
    await rack.until_ready()
