"""The gateway workers as the supervisor sees them: kept processes that get the table and send counters.

A worker outlives its supervisor as an engine does; the listening socket is handed to its keeper, which gives it back
to a supervisor that returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarack.config import Gateway, plain
from llamarack.environment import gateway_environment
from llamarack.errors import ConfigError
from llamarack.paths import RackPaths
from llamarack.supervise.journal import Journal
from llamarack.supervise.keeping import ChildSpec, KeptChild, attach_child, fetch_fds, start_child
from llamarack.supervise.memory_file import SavedGateway
from llamarack.supervise.table import Table, to_json
from llamarack.supervise.tally import Tally, total
from llamarack.supervise.traffic import TrafficLog
from llamarack.units import format_duration

_BACKLOG = 1024
_RESTART_WAIT_S = 0.2
_LONGEST_WAIT_S = 10.0
_LIVED_S = 5.0  # a worker that lived so long did not die of its start
_DRAIN_POLL_S = 0.02


@dataclass(slots=True)
class Counts:
    """The newest report of one worker. `table_version`: the table it has acted on."""

    table_version: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)
    stuck: dict[str, int] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)  # by replica, the fields of a Tally


class GatewayPool:
    def __init__(self, settings: Gateway, stuck_request_s: float, paths: RackPaths, journal: Journal) -> None:
        self.settings = settings
        self.stuck_request_s = stuck_request_s
        self.port = settings.port
        self.counts: dict[int, Counts] = {}
        self.traffic: dict[int, TrafficLog] = {}
        self.children: dict[int, KeptChild] = {}
        self._paths = paths
        self._journal = journal
        self._table: Table | None = None
        self._links: dict[int, asyncio.StreamWriter] = {}
        self._listener: socket.socket | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.heard = asyncio.Event()

    async def open_port(self, remembered: Sequence[SavedGateway]) -> None:
        """Takes back the workers of an earlier supervisor, or listens anew. Raises ConfigError for a taken port."""
        self.children = await self._take_back(remembered)
        if self._listener is None:
            self._listener = listen(self.settings.host, self.settings.port)
        self.port = self._listener.getsockname()[1]

    async def start(self) -> None:
        """Starts the workers that were not taken back; keeps them all."""
        for worker in range(self.settings.workers):
            if worker not in self.children:
                self.children[worker] = await self._start(worker)
            self._watchers.append(asyncio.create_task(self._keep(worker), name=f"gateway {worker}"))

    async def stop(self) -> None:
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(self._end(child) for child in self.children.values()))
        for writer in self._links.values():
            writer.close()
        if self._listener is not None:
            self._listener.close()

    def publish(self, table: Table) -> None:
        self._table = table
        for writer in self._links.values():
            self._send(writer, {"table": to_json(table)})

    def apply(self, settings: Gateway) -> None:
        """Other limits and habits for the workers that run; where they listen stays (see live_settings)."""
        self.settings = settings
        for writer in self._links.values():
            self._send(writer, {"settings": plain(settings)})

    def tallies(self) -> dict[str, Tally]:
        """By replica, over all workers."""
        by_replica: dict[str, list[Tally]] = {}
        for counts in self.counts.values():
            for replica, fields in counts.outcomes.items():
                by_replica.setdefault(replica, []).append(Tally(**fields))
        return {replica: total(tallies) for replica, tallies in by_replica.items()}

    async def serve_link(self, worker: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One worker's connection, until it ends: settings and table go out, counters come in."""
        self._links[worker] = writer
        self._send(
            writer,
            {
                "settings": plain(self.settings),
                "stuck_request_s": self.stuck_request_s,
                "folder": str(self._paths.folder),
            },
        )
        if self._table is not None:
            self._send(writer, {"table": to_json(self._table)})
        try:
            while line := await reader.readline():
                message = json.loads(line)
                self.counts[worker] = Counts(**message["counts"])
                self.traffic.setdefault(worker, TrafficLog()).take(message.get("traffic", {}))
                self.heard.set()
                self.heard = asyncio.Event()
        finally:
            if self._links.get(worker) is writer:
                del self._links[worker]
                self.counts.pop(worker, None)

    def in_flight(self, replica: str) -> int:
        """Requests there, over all workers."""
        return sum(counts.in_flight.get(replica, 0) for counts in self.counts.values())

    def in_flight_total(self) -> int:
        return sum(sum(counts.in_flight.values()) + sum(counts.queued.values()) for counts in self.counts.values())

    def has_acted_on(self, version: int) -> bool:
        """Whether every worker is here and lets requests in by this table."""
        current = [counts for counts in self.counts.values() if counts.table_version >= version]
        return len(current) >= self.settings.workers

    async def acted_on(self, version: int, timeout_s: float) -> bool:
        """The same once it is so; False when that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.has_acted_on(version):
                    await self.heard.wait()
                return True
        return False

    async def drained(self, replica: str | None, version: int, timeout_s: float) -> bool:
        """Waits until every worker has acted on `version` and nothing runs on `replica` (None: at all)."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            behind = any(self._has_not_seen(worker, version) for worker in self._links)
            if replica is None:
                busy = sum(sum(counts.in_flight.values()) for counts in self.counts.values())
            else:
                busy = self.in_flight(replica)
            if not behind and not busy:
                return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(_DRAIN_POLL_S, min(0.5, deadline - time.monotonic()))):
                    await self.heard.wait()
        return False

    def remembered(self) -> list[SavedGateway]:
        return [
            SavedGateway(
                control_socket=child.control_socket, start_ticks=child.start_ticks, settings=self._fingerprint()
            )
            for child in self.children.values()
            if child.exit is None
        ]

    def _has_not_seen(self, worker: int, version: int) -> bool:
        counts = self.counts.get(worker)
        return counts is None or counts.table_version < version

    def _fingerprint(self) -> str:
        return f"{json.dumps(plain(self.settings))} {self.stuck_request_s}"

    async def _take_back(self, remembered: Sequence[SavedGateway]) -> dict[int, KeptChild]:
        adopted: dict[int, KeptChild] = {}
        for saved in remembered:
            child = await attach_child(saved.control_socket)
            if child is None:
                continue
            same = child.exit is None and saved.settings == self._fingerprint() and len(adopted) < self.settings.workers
            if same and child.start_ticks == saved.start_ticks:
                if self._listener is None:
                    (fd,) = await fetch_fds(saved.control_socket)
                    self._listener = socket.socket(fileno=fd)
                adopted[len(adopted)] = child
                self._journal.note("adopted", "gateway taken back", replica=None, pid=child.pid)
            else:
                await self._end(child)
        return adopted

    async def _start(self, worker: int) -> KeptChild:
        assert self._listener is not None
        fd = self._listener.fileno()
        return await start_child(
            ChildSpec(
                argv=[
                    sys.executable,
                    "-m",
                    "llamarack.gateway.worker",
                    str(fd),
                    str(self._paths.admin_socket),
                    str(worker),
                ],
                env=gateway_environment(os.environ),
                log_path=self._paths.log_of(f"gateway-{worker}"),
                control_socket=self._paths.keeper_socket(f"gateway-{worker}"),
                inherit_fds=[fd],
            )
        )

    async def _keep(self, worker: int) -> None:
        """For ever: it is the only door. What dies at once is started ever less often."""
        wait_s = _RESTART_WAIT_S
        while True:
            child, since = self.children[worker], time.monotonic()
            await child.exited.wait()
            assert child.exit is not None
            if time.monotonic() - since >= _LIVED_S:
                wait_s = _RESTART_WAIT_S
            self._journal.error(
                "gateway_died",
                f"gateway worker {worker}: {child.exit.words}; started again in {format_duration(wait_s)}",
            )
            await child.release()
            while True:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                try:
                    self.children[worker] = await self._start(worker)
                    break
                except (OSError, TimeoutError) as error:
                    self._journal.error(
                        "gateway_died",
                        f"gateway worker {worker} cannot be started: {error or type(error).__name__}; "
                        f"tried again in {format_duration(wait_s)}",
                    )

    async def _end(self, child: KeptChild) -> None:
        if child.exit is None:
            await child.stop(grace_s=3.0)
        await child.release()

    @staticmethod
    def _send(writer: asyncio.StreamWriter, message: dict[str, object]) -> None:
        if not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError naming the holder of a taken port where it can be seen."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"`gateway.host`: `{host}` is no address: {error}", hint="host: 127.0.0.1") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        holder = _holder_of(port)
        raise ConfigError(
            f"`gateway.port`: {port} on {host} cannot be listened on: {error.strerror}{holder}",
            hint=f"another port, such as port: {port + 1} (--port {port + 1}), or port: 0 for any free one",
        ) from error
    listener.setblocking(False)
    return listener


def _holder_of(port: int) -> str:
    import psutil  # for this alone

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and address and address[1] == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
