"""The gateway's workers as the supervisor keeps them: heard before a rack is settled, started again when they die."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from llamarack.supervise.admin import ask
from tests.supervise.asking import stream_once
from tests.supervise.conftest import (
    DEADLINE_S,
    left_of,
    running_rack,
    until_http_ready,
)
from tests.supervise.faults import Fault

pytestmark = pytest.mark.process


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
