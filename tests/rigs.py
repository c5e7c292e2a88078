"""Real processes for tests without a whole rack: fake engines, and a gateway worker whose supervisor is the test.

async with fake_engine(tmp_path) as engine, gateway_worker(tmp_path, [engine.row()]) as gateway: ...
"""

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from llamarack.config import Defaults, Gateway, plain, validated
from llamarack.engine.dialect import Endpoint
from llamarack.gateway.admission import Admission
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.server import GatewayServer
from llamarack.supervise.state import State
from llamarack.supervise.table import ModelRow, ReplicaRow, Table, to_json
from tests.fake_adaptor import FAKE_ENGINE, flags

# Far above what anything here takes, also on a loaded machine; reached only when something hangs.
DEADLINE_S = 30.0
_POLL_S = 0.01
_LINK_LIMIT_BYTES = 4 * 1024**2


async def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition` (a coroutine function or a function). Fails with `what` at the deadline."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                value = condition()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE_S:g} s: {what}") from None


@dataclass
class Engine:
    """A running fake engine."""

    id: str
    model: str
    flavor: str
    slots: int
    context_tokens: int
    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    log: Path
    session: aiohttp.ClientSession

    def row(self, state: State = State.READY) -> ReplicaRow:
        return ReplicaRow(
            id=self.id,
            model=self.model,
            engine=self.flavor,
            state=state,
            endpoint=self.endpoint,
            slots=self.slots,
            context_tokens=self.context_tokens,
        )

    async def record(self) -> dict[str, Any]:
        async with self.session.get("http://engine/fake/record") as response:
            value: dict[str, Any] = await response.json()
            return value

    async def order(self, **faults: Any) -> dict[str, Any]:
        """Faults for all requests to come; returns all of them."""
        async with self.session.post("http://engine/fake/faults", data=json.dumps(faults)) as response:
            assert response.status == 200
            value: dict[str, Any] = await response.json()
            return value

    @contextlib.asynccontextmanager
    async def ordered(self, **faults: Any) -> AsyncIterator[None]:
        """The same for a while."""
        before = await self.order()
        await self.order(**faults)
        try:
            yield
        finally:
            await self.order(**{name: before[name] for name in faults})

    async def requests(self) -> list[dict[str, Any]]:
        """Those for tokens, oldest first."""
        record = await self.record()
        return [each for each in record["requests"] if each["path"].endswith("completions")]

    async def last_body(self) -> bytes:
        return base64.b64decode((await self.requests())[-1]["body_base64"])

    async def is_idle(self) -> bool:
        record = await self.record()
        return not record["running"] and not record["waiting"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.asynccontextmanager
async def fake_engine(
    folder: Path,
    id: str = "fake-0",
    *,
    model: str = "fake",
    slots: int = 4,
    context_tokens: int = 100_000,
    answer_tokens: int = 8,
    key: str | None = None,
    wait: bool = True,
    **faults: Any,
) -> AsyncIterator[Engine]:
    """`wait`: until it is loaded; without, until it listens."""
    path, log = folder / f"{id}.sock", folder / f"{id}.log"
    path.unlink(missing_ok=True)
    words = {"socket": path, "model": model, "slots": slots, "answer_tokens": answer_tokens}
    argv = [sys.executable, "-I", "-S", str(FAKE_ENGINE), *flags({**words, "context_tokens": context_tokens, **faults})]
    token = key or f"key-of-{id}-{os.urandom(4).hex()}"
    with log.open("wb") as out:
        environment = {"LLAMARACK_ENGINE_KEY": token, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out)  # noqa: ASYNC220 - takes 1 ms
    endpoint = Endpoint(socket=path, port=None, key=token, served_name=model)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(path), force_close=True)) as session:
        engine = Engine(
            id, model, str(faults.get("flavor", "llamacpp")), slots, context_tokens, process, endpoint, log, session
        )
        try:
            await until(lambda: _health(engine, wait), f"{id} listens; its log: {log.read_text()}")
            yield engine
        finally:
            engine.kill()


async def _health(engine: Engine, loaded: bool) -> bool:
    try:
        async with engine.session.get("http://engine/health") as response:
            return response.status == 200 or not loaded
    except (aiohttp.ClientError, OSError):
        assert engine.process.poll() is None, engine.log.read_text()
        return False


@dataclass
class Address:
    """Where a gateway listens."""

    host: str
    port: int


@contextlib.asynccontextmanager
async def gateway_in_process(
    replicas: Sequence[ReplicaRow], *, http: str | None = None, **settings: Any
) -> AsyncIterator[Address]:
    """The gateway's server on the test's own event loop, whose tasks can be counted. `http`: fast | aiohttp."""
    chosen = validated(Gateway, {"port": 0, **settings}, strict=False)
    admission = Admission(max_queue_requests=chosen.max_queue_requests, max_queue_s=chosen.max_queue_s)
    models = tuple(_models(replicas, Defaults(max_tokens=None), None))
    admission.apply(Table(version=1, draining=False, models=models, replicas=tuple(replicas)))
    protocol = GatewayServer(chosen, admission, Metrics(), None).protocol_factory(http=http)
    server = await asyncio.get_running_loop().create_server(protocol, chosen.host, 0)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield Address(host, port)
    finally:
        server.close()
        await protocol.shutdown(DEADLINE_S)


def _models(replicas: Sequence[ReplicaRow], defaults: Defaults, cap: int | None) -> list[ModelRow]:
    names = dict.fromkeys(row.model for row in replicas)
    return [ModelRow(name=n, created_unix_s=1, defaults=defaults, max_output_tokens=cap) for n in names]


@dataclass
class GatewayRig:
    """A gateway worker and what its supervisor would know of it."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    log: Path
    models: list[ModelRow]
    version: int = 0
    counts: dict[str, Any] = field(default_factory=dict)
    link: asyncio.StreamWriter | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def counts_of(self, name: str) -> int:
        """`in_flight` or `queued`, over all replicas or models."""
        return sum(self.counts.get(name, {}).values())

    async def set_table(self, replicas: Sequence[ReplicaRow], *, draining: bool = False) -> None:
        """Returns once the worker acts on it."""
        self.version += 1
        table = Table(version=self.version, draining=draining, models=tuple(self.models), replicas=tuple(replicas))
        assert self.link is not None
        self.link.write(json.dumps({"table": to_json(table)}).encode() + b"\n")
        wanted = self.version
        await until(lambda: self.counts.get("table_version", 0) >= wanted, "the worker has the table")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


@contextlib.asynccontextmanager
async def gateway_worker(
    folder: Path,
    replicas: Sequence[ReplicaRow],
    *,
    name: str = "gateway",
    defaults: Defaults | None = None,
    max_output_tokens: int | None = None,
    stuck_request_s: float = 300.0,
    **settings: Any,
) -> AsyncIterator[GatewayRig]:
    """`python -m llamarack.gateway.worker` with `settings` of the deployment file's `gateway:` section."""
    models = _models(replicas, defaults or Defaults(max_tokens=None), max_output_tokens)
    linked = asyncio.Event()
    admin, log = folder / f"{name}.admin.sock", folder / f"{name}.log"
    admin.unlink(missing_ok=True)
    chosen = validated(Gateway, {"port": 0, **settings}, strict=False)

    async def serve_link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        assert hello["op"] == "gateway"
        told = {
            "settings": plain(chosen),
            "stuck_request_s": stuck_request_s,
            "folder": str(folder),
        }
        writer.write(json.dumps(told).encode() + b"\n")
        rig.link = writer
        linked.set()
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                rig.counts = json.loads(line)["counts"]
        writer.close()

    server = await asyncio.start_unix_server(serve_link, str(admin), limit=_LINK_LIMIT_BYTES)
    with socket.create_server((chosen.host, 0), backlog=1024) as listener, log.open("wb") as out:
        argv = [sys.executable, "-m", "llamarack.gateway.worker", str(listener.fileno()), str(admin), "0"]
        process = subprocess.Popen(argv, pass_fds=[listener.fileno()], stdout=out, stderr=out)  # noqa: ASYNC220
        host, port = listener.getsockname()[:2]
    rig = GatewayRig(process, host, port, log, models)
    try:
        await until(lambda: linked.is_set() or process.poll() is not None, "the worker links up")
        assert process.poll() is None, rig.log_text()
        await rig.set_table(replicas)
        yield rig
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if rig.link is not None:
            rig.link.close()
        server.close()
        await server.wait_closed()
