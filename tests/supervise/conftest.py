"""A running rack of fake engines for a test, and the proof that nothing of it is left."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamarack.supervise.admin import AdminServer
from llamarack.supervise.supervisor import Supervisor
from tests.fake_rack import build

DEADLINE_S = 40.0


@pytest.fixture(autouse=True)
def own_load_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests must not wait for a model that somebody else loads on this machine."""
    monkeypatch.setenv("LLAMARACK_LOAD_LOCK", str(tmp_path / "load.lock"))


class RunningRack:
    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.running: asyncio.Task[None] | None = None
        self._admin = AdminServer(supervisor)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.supervisor.gateways.port}"

    async def start(self) -> None:
        await self.supervisor.start()
        await self._admin.start()
        self.running = asyncio.create_task(self.supervisor.run())

    async def stop(self) -> None:
        self.supervisor.ask_stop()
        assert self.running is not None
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(self.running, return_exceptions=True)
        await self._admin.stop()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that the journal or the states will show."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_ready(self) -> None:
        await self.until(lambda: all(replica.state == "ready" for replica in self.supervisor.replicas))

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.supervisor.journal.recent]


@contextlib.asynccontextmanager
async def running_rack(folder: Path, replicas: list[dict[str, Any]], **supervise: Any) -> AsyncIterator[RunningRack]:
    rack = RunningRack(build(folder, replicas, **supervise))
    await rack.start()
    try:
        yield rack
    finally:
        await rack.stop()


def left_of(folder: Path) -> list[str]:
    """Processes and sockets that a rack in `folder` left behind."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = " ".join(process.cmdline())
            mark = Path(f"/proc/{process.pid}/environ").read_bytes()
            if process.pid != os.getpid() and (str(folder) in words or str(folder).encode() in mark):
                left.append(f"{process.pid} {words[:100]}")
    left += [str(path) for path in folder.rglob("*.sock")]
    return left
