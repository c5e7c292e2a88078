"""A running rack of fake engines for a test, and the proof that nothing of it is left."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from llamarack.supervise.admin import AdminServer
from llamarack.supervise.replica import Replica
from llamarack.supervise.supervisor import Supervisor
from tests.fake_rack import build
from tests.supervise.faults import Fault

DEADLINE_S = 40.0


@pytest.fixture(autouse=True)
def own_load_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests must not wait for a model that somebody else loads on this machine."""
    monkeypatch.setenv("LLAMARACK_LOAD_LOCK", str(tmp_path / "load.lock"))


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[Fault]:
    """The clock of a fault test: `strikes`, `is_found`, `is_over`."""
    clock = Fault()
    yield clock
    clock.write(request.node.nodeid)


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

    async def until(self, condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
        """Waits for something that the journal or the states will show."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            entries = self.supervisor.journal.recent
            told = "\n".join(f"{entry.kind} {entry.replica}: {entry.message}" for entry in entries)
            raise AssertionError(f"not within {within_s:g} s; the journal:\n{told}") from None

    async def until_ready(self, within_s: float = DEADLINE_S) -> None:
        await self.until(lambda: all(replica.state == "ready" for replica in self.supervisor.replicas), within_s)

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


async def order(replica: Replica, **faults: Any) -> None:
    """Faults for all requests that this running fake engine will get; the next start knows nothing of them."""
    assert replica.endpoint is not None
    connector = aiohttp.UnixConnector(path=str(replica.endpoint.socket))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post("http://engine/fake/faults", data=json.dumps(faults)) as response,
    ):
        assert response.status == 200


async def until_http_ready(url: str) -> None:
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.02)


def start_process(
    folder: Path, replicas: list[dict[str, object]], room_bytes: int | None = None
) -> subprocess.Popen[bytes]:
    """The same rack under a supervisor in a process of its own, to be killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fake_rack", str(folder), json.dumps(replicas), json.dumps(room_bytes)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


async def port_of(process: subprocess.Popen[bytes]) -> int:
    """The gateway's, once that rack is settled."""
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), DEADLINE_S)
    port: int = json.loads(line)["port"]
    return port


@contextlib.asynccontextmanager
async def rack_process(
    folder: Path, replicas: list[dict[str, Any]], *, before: str = "true"
) -> AsyncIterator[tuple[int, subprocess.Popen[bytes]]]:
    """The same rack under a supervisor in a process of its own, once it is settled: its port and the process.

    `before`: a shell command run in that process first, such as `ulimit -n 64`.
    """
    rack = [sys.executable, "-m", "tests.fake_rack", str(folder), json.dumps(replicas)]
    process = subprocess.Popen(  # noqa: ASYNC220 - takes 1 ms
        ["/bin/sh", "-c", f'{before} && exec "$@"', "rack", *rack],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), DEADLINE_S)
        yield json.loads(line)["port"], process
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, DEADLINE_S)
        process.stdout.close()


def processes_of(folder: Path) -> list[str]:
    """Processes of a rack in `folder`, this one left out: what names it in its command line or its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = " ".join(process.cmdline())
            mark = Path(f"/proc/{process.pid}/environ").read_bytes()
            if process.pid != os.getpid() and (str(folder) in words or str(folder).encode() in mark):
                found.append(f"{process.pid} {words[:100]}")
    return found


def left_of(folder: Path) -> list[str]:
    """Processes and sockets that a rack in `folder` left behind."""
    return [*processes_of(folder), *(str(path) for path in folder.rglob("*.sock"))]
