"""One request to an engine and its reply, over a connection of its own. The seam behind which the transport may change.

Connections are not reused: opening one costs some 50 us on a Unix socket, and a connection that the engine closed for
being idle would look like an engine that died. Plain asyncio protocols, since this is where every token passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import httptools

from llamarack.engine.adaptor import Endpoint

# A reply head may take as long as a prefill; the request's own deadline ends it.
_CONNECT_TIMEOUT_S = 5.0
_HIGH_WATER_BYTES = 256 * 1024


class EngineBroke(Exception):
    """The connection failed or ended early: the engine died, was killed, or lost the request."""


class EngineReply(asyncio.Protocol):
    """`status` is there once `post` returned it; the body comes as it is read. Always `close` it."""

    def __init__(self, request: bytes) -> None:
        self.status = 0
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._head = asyncio.get_running_loop().create_future()
        self._news: asyncio.Future[None] | None = None  # somebody waits for the next of the body
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._framed = False  # by length or chunks; else the end of the connection ends the body
        self._ended = False
        self._fault: str | None = None

    async def head(self) -> None:
        """Waits for the status. Raises EngineBroke."""
        await self._head

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, in the pieces that arrived. Raises EngineBroke where it ends early."""
        while True:
            if self._parts:
                yield self._take()
            elif self._fault is not None:
                raise EngineBroke(self._fault)
            elif self._ended:
                return
            else:
                self._news = asyncio.get_running_loop().create_future()
                await self._news

    async def read(self) -> bytes:
        """The whole body. Raises EngineBroke where it ends early."""
        return b"".join([piece async for piece in self.chunks()])

    def close(self) -> None:
        """Drops the connection; an engine that is still at work sees it and frees the slot."""
        if self._transport is not None:
            self._transport.abort()

    def _take(self) -> bytes:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._held_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _break(self, fault: str) -> None:
        if self._ended or self._fault is not None:
            return
        self._fault = fault
        if not self._head.done():
            self._head.set_exception(EngineBroke(fault))
            self._head.exception()  # taken note of, also when nobody waits any more
        self._wake()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"its reply is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._head.done() and not self._framed and error is None:
            self._ended = True
            self._wake()
        self._break(str(error) if error else "it closed the connection")

    # -- httptools ----------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if not self._head.done():
            self._head.set_result(None)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        self._ended = True
        self._wake()


async def post(endpoint: Endpoint, path: str, body: bytes, headers: dict[str, str]) -> EngineReply:
    """The reply once its head is there; the caller closes it. Raises EngineBroke."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"{_head('POST', endpoint, path)}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    )
    return await _exchange(endpoint, head.encode("latin-1", "replace") + body)


async def get_text(endpoint: Endpoint, path: str, timeout_s: float) -> str | None:
    """The text of a 200 reply, None for anything else."""
    try:
        async with asyncio.timeout(timeout_s):
            reply = await _exchange(endpoint, f"{_head('GET', endpoint, path)}\r\n".encode())
            try:
                return (await reply.read()).decode(errors="replace") if reply.status == 200 else None
            finally:
                reply.close()
    except (EngineBroke, TimeoutError):
        return None


def _head(method: str, endpoint: Endpoint, path: str) -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\nAuthorization: Bearer {endpoint.key}\r\n"


async def _exchange(endpoint: Endpoint, request: bytes) -> EngineReply:
    loop = asyncio.get_running_loop()

    def protocol() -> EngineReply:
        return EngineReply(request)

    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            if endpoint.socket is not None:
                _, reply = await loop.create_unix_connection(protocol, str(endpoint.socket))
            else:
                assert endpoint.port is not None  # an endpoint has one of the two
                _, reply = await loop.create_connection(protocol, "127.0.0.1", endpoint.port)
    except (OSError, TimeoutError) as error:
        raise EngineBroke(str(error) or "it does not accept connections") from error
    try:
        await reply.head()
    except BaseException:
        reply.close()
        raise
    return reply
