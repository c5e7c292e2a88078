"""One gateway process: `python -m llamarack.gateway.worker LISTEN_FD ADMIN_SOCKET WORKER`.

It gets its settings and the replica table over the admin socket and sends counters back. When the supervisor is gone
it serves on with the table it has and knocks until one is back; its keeper ends it if none comes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import ssl
import sys
from typing import Any

import uvloop

from llamarack.config import Gateway
from llamarack.errors import ConfigError
from llamarack.gateway.admission import Admission
from llamarack.gateway.dashboard import Dashboard
from llamarack.gateway.keys import Keys
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.server import GatewayServer
from llamarack.supervise.table import from_json

_RECONNECT_S = 0.2
_REPORT_S = 0.25
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
        if self._server is not None:
            self._server.close()

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
                    await self._take(Gateway.model_validate(message["settings"]))
                if "table" in message and self._admission is not None:
                    table = from_json(message["table"])
                    self._admission.apply(table)
                    self._send_counts(writer)
        finally:
            reporting.cancel()

    async def _take(self, settings: Gateway) -> None:
        """The first settings open the door; later ones, after a reload, change limits and keys while it is open."""
        if self._admission is None or self._gateway is None:
            await self._open(settings)
            return
        try:
            keys = Keys(settings.api_keys_file) if settings.api_keys_file else None
        except ConfigError as error:  # never open a door because its keys were moved away
            log.error("settings_refused worker=%d error=%s", self._number, error)
            return
        self._admission.set_limits(**_limits(settings))
        self._gateway.apply(settings, keys)

    async def _open(self, settings: Gateway) -> None:
        """Begins to accept; once in a worker's life."""
        self._admission = Admission(**_limits(settings))
        keys = Keys(settings.api_keys_file) if settings.api_keys_file else None
        dashboard = Dashboard(self._admin_socket)
        server = self._gateway = GatewayServer(settings, self._admission, self._metrics, keys, dashboard)
        context = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
            context.set_alpn_protocols(["http/1.1"])
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(server.protocol_factory(), sock=self._listener, ssl=context)
        log.info("listening worker=%d address=%s", self._number, self._listener.getsockname())

    async def _report(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            if self._admission is not None:
                self._send_counts(writer)

    def _send_counts(self, writer: asyncio.StreamWriter) -> None:
        """Sent when it changed; the supervisor keeps the newest."""
        assert self._admission is not None
        counts = {
            "table_version": self._admission.table.version,
            "in_flight": self._admission.in_flight,
            "queued": self._admission.queued,
            "outcomes": self._gateway.outcomes.report([row.id for row in self._admission.table.replicas])
            if self._gateway
            else {},
        }
        traffic = self._metrics.traffic.report(whole=self._report_whole)
        if counts != self._reported or traffic:
            self._reported = json.loads(json.dumps(counts))
            self._report_whole = False
            writer.write(json.dumps({"counts": counts, "traffic": traffic}).encode() + b"\n")


def _limits(settings: Gateway) -> dict[str, Any]:
    """What of the settings concerns admission, at the start and after a reload."""
    return {"max_queue_requests": settings.max_queue_requests, "max_queue_s": settings.max_queue_s}


def main() -> None:
    fd, admin_socket, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    uvloop.run(Worker(listener, admin_socket, int(number)).run())


if __name__ == "__main__":
    main()
