"""One HTTP/1.1 connection whose reads are stamped before anything looks at them.

Every socket that is readable in one turn of the event loop is stamped first; parsing follows in the next turn. So one
busy stream does not make its neighbours look late. No retry, no redirect, no compression: what the server did is seen.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import Protocol, cast

import httptools

from llamarack.measure.target import Target


class Receiver(Protocol):
    """Who is told about one response. `end` is called exactly once."""

    def headers(self, status: int, at_ns: int) -> None: ...
    def body(self, data: bytes, at_ns: int) -> None: ...
    def end(self, *, is_whole: bool, at_ns: int) -> None: ...


class Connection(asyncio.Protocol):
    """Used by one request at a time; `is_reusable` after its end says whether another may follow."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reads: list[tuple[int, bytes]] = []
        self._is_parse_due = False
        self._at_ns = 0
        self._first_byte_ns = 0
        self._has_headers = False
        self._is_framed = False
        self._is_closed = False
        self._may_follow = True
        self.num_requests = 0

    def send(self, request: bytes, receiver: Receiver) -> int:
        """Gives the bytes to the kernel as far as it takes them. Returns the stamp from just before."""
        assert self._receiver is None
        assert self._transport is not None
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self._has_headers = self._is_framed = False
        self._first_byte_ns = 0
        self.num_requests += 1
        sent_ns = time.monotonic_ns()
        self._transport.write(request)
        return sent_ns

    @property
    def is_reusable(self) -> bool:
        return not self._is_closed and self._receiver is None and self._may_follow

    def abort(self) -> None:
        """The server sees a reset or an end of stream; the receiver hears nothing more."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class, only by its methods
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._reads.append((time.monotonic_ns(), data))
        if not self._is_parse_due:
            self._is_parse_due = True
            self._loop.call_soon(self._parse)

    def connection_lost(self, error: Exception | None) -> None:
        at_ns = time.monotonic_ns()
        self._parse()
        self._is_closed = True
        # A body without a length lasts until the close (RFC 9112, section 6.3); any other is cut off here.
        self._end(is_whole=error is None and self._has_headers and not self._is_framed, at_ns=at_ns)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-length" or (name.lower() == b"transfer-encoding" and b"chunked" in value.lower()):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        self._has_headers = True
        if self._receiver is not None:
            self._receiver.headers(self._parser.get_status_code(), self._first_byte_ns)

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(data, self._at_ns)

    def on_message_complete(self) -> None:
        self._may_follow = self._parser.should_keep_alive()  # the parser forgets it after this call
        self._end(is_whole=True, at_ns=self._at_ns)

    def _parse(self) -> None:
        self._is_parse_due = False
        reads, self._reads = self._reads, []
        for at_ns, data in reads:
            self._at_ns = at_ns
            self._first_byte_ns = self._first_byte_ns or at_ns
            if self._receiver is None:
                self._close()  # bytes nobody asked for
                return
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError:
                self._close()
                self._end(is_whole=False, at_ns=at_ns)
                return

    def _close(self) -> None:
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def _end(self, *, is_whole: bool, at_ns: int) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.end(is_whole=is_whole, at_ns=at_ns)


async def connect(target: Target, context: ssl.SSLContext | None) -> Connection:
    """Raises OSError (refused, unknown host, TLS)."""
    loop = asyncio.get_running_loop()
    if target.unix_path is not None:
        _, connection = await loop.create_unix_connection(Connection, target.unix_path)
        return connection
    _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=context)
    return connection
