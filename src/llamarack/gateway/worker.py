"""One gateway process: `python -m llamarack.gateway.worker LISTEN_FD ADMIN_SOCKET WORKER`.

It gets its settings and the replica table over the admin socket and sends counters back. When the supervisor is gone
it serves on with the table it has and knocks until one is back; its keeper ends it if none comes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from llamarack.config import Gateway, gateway_from_plain
from llamarack.errors import ConfigError
from llamarack.gateway.admission import Admission
from llamarack.gateway.dashboard import Dashboard
from llamarack.gateway.ledger import Ledger
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.peers import PeerSocket
from llamarack.gateway.quota import Quotas
from llamarack.gateway.server import GatewayServer
from llamarack.logs import set_up_logging
from llamarack.supervise.table import from_json

if TYPE_CHECKING:
    from llamarack.gateway.keys import Keys

_RECONNECT_S = 0.2
_REPORT_S = 0.25
_SAVE_EVERY = 20  # reports
_GC_THRESHOLD = (20_000, 20, 20)
_LINK_LIMIT_BYTES = 4 * 1024**2

log = logging.getLogger(__name__)


class Worker:
    def __init__(self, listener: socket.socket, admin_socket: str, number: int) -> None:
        self._listener = listener
        self._admin_socket = admin_socket
        self._number = number
        self._metrics = Metrics()
        self._admission: Admission | None = None
        self._gateway: GatewayServer | None = None
        self._server: asyncio.Server | None = None
        self._ledger: Ledger | None = None
        self._peers: PeerSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reported: dict[str, Any] = {}
        self._report_whole = True  # a supervisor that is new knows none of the traffic

    async def run(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is the supervisor's to act on
        link = asyncio.create_task(self._stay_linked())
        await asyncio.wait({link, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if link.done():
            link.result()
        link.cancel()
        await self._end()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        if self._gateway is not None:
            self._gateway.close()
        if self._peers is not None:
            self._peers.close()
        if self._ledger is not None:
            asyncio.get_running_loop().remove_reader(self._ledger.bell)
            self._ledger.close()

    async def _stay_linked(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._admin_socket, limit=_LINK_LIMIT_BYTES)
                try:
                    await self._linked(reader, writer)
                finally:
                    writer.close()
            except OSError:
                pass  # no supervisor at the moment
            except ValueError as error:
                log.error("link_broken worker=%d error=%s", self._number, error)
            await asyncio.sleep(_RECONNECT_S)

    async def _linked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"op": "gateway", "worker": self._number}).encode() + b"\n")
        self._reported = {}
        self._report_whole = True
        reporting = asyncio.create_task(self._report(writer))
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "settings" in message:
                    await self._take(message)
                if "table" in message and self._admission is not None:
                    table = from_json(message["table"])
                    self._admission.apply(table)
                    self._send_counts(writer)
        finally:
            reporting.cancel()

    async def _take(self, message: dict[str, Any]) -> None:
        """The first settings open the door; later ones, after a reload, change limits and keys while it is open."""
        if self._admission is None or self._gateway is None:
            await self._open(message)
            return
        settings = gateway_from_plain(message["settings"])
        try:
            keys = _keys(settings)
        except ConfigError as error:  # never open a door because its keys were moved away
            log.error("settings_refused worker=%d error=%s", self._number, error)
            return
        self._admission.set_limits(**_limits(settings))
        self._gateway.apply(settings, keys)

    async def _open(self, message: dict[str, Any]) -> None:
        """Begins to accept; once in a worker's life."""
        settings = gateway_from_plain(message["settings"])
        folder = Path(message["folder"]) if message.get("folder") else None
        loop = asyncio.get_running_loop()
        sockets = Path(self._admin_socket).parent
        if settings.workers > 1:
            self._ledger = Ledger(sockets, self._number, settings.workers)
        admission = self._admission = Admission(
            **_limits(settings),
            ledger=self._ledger,
        )
        if self._ledger is not None:
            self._peers = PeerSocket(sockets, self._number, settings.workers, self._metrics.counted_text)
            await self._peers.open()
            loop.add_reader(self._ledger.bell, self._rung)
        gateway = self._gateway = GatewayServer(
            settings,
            admission,
            self._metrics,
            _keys(settings),
            Dashboard(self._admin_socket),
            quotas=Quotas(
                admission,
                time.time,
                ledger=self._ledger,
                folder=folder if settings.api_keys_file else None,
                worker=self._number,
                workers=settings.workers,
            ),
            stuck_request_s=message.get("stuck_request_s", 300.0),
            peers=self._peers.texts if self._peers is not None else None,
        )
        self._tasks.append(asyncio.create_task(gateway.watch.run()))
        context = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
            context.set_alpn_protocols(["http/1.1"])
        self._server = await loop.create_server(gateway.protocol_factory(), sock=self._listener, ssl=context)
        # What was imported and built lives as long as the process: looking through it again at every collection would
        # hold up all streams for some milliseconds each time. Requests make few cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLD)
        log.info("listening worker=%d address=%s", self._number, self._listener.getsockname())

    def _rung(self) -> None:
        assert self._ledger is not None
        assert self._admission is not None
        self._ledger.hush()
        self._admission.rung()

    async def _report(self, writer: asyncio.StreamWriter) -> None:
        number = 0
        while True:
            await asyncio.sleep(_REPORT_S)
            number += 1
            if self._admission is not None:
                self._send_counts(writer)
            if self._gateway is not None and number % _SAVE_EVERY == 0:
                self._gateway.save()

    def _send_counts(self, writer: asyncio.StreamWriter) -> None:
        """Sent when it changed; the supervisor keeps the newest."""
        assert self._admission is not None
        counts = {
            "table_version": self._admission.table.version,
            "in_flight": self._admission.in_flight,
            "queued": self._admission.queued,
            "stuck": self._admission.stuck,
            "outcomes": self._gateway.outcomes.report([row.id for row in self._admission.table.replicas])
            if self._gateway is not None
            else {},
        }
        traffic = self._metrics.traffic.report(whole=self._report_whole)
        if counts != self._reported or traffic:
            self._reported = json.loads(json.dumps(counts))
            self._report_whole = False
            writer.write(json.dumps({"counts": counts, "traffic": traffic}).encode() + b"\n")


def _keys(settings: Gateway) -> Keys | None:
    """Raises ConfigError for a keys file that is none."""
    if settings.api_keys_file is None:
        return None
    from llamarack.gateway.keys import Keys  # what reads the file takes as long to import as all the rest of a worker

    return Keys(settings.api_keys_file)


def _limits(settings: Gateway) -> dict[str, Any]:
    """What of the settings concerns admission, at the start and after a reload."""
    return {
        "max_queue_requests": settings.max_queue_requests,
        "max_queue_s": settings.max_queue_s,
        "max_queue_tokens": settings.max_queue_tokens,
        "policy": settings.routing,
    }


def main() -> None:
    fd, admin_socket, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    set_up_logging()
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    uvloop.run(Worker(listener, admin_socket, number).run())


if __name__ == "__main__":
    main()
