"""HTTP/1.1 for clients over plain asyncio protocols and httptools: one object a connection, one task a request.

Every stock `java.net.http.HttpClient` offers `Upgrade: h2c`; httptools would drop the body that follows, so the offer
is hidden from it. A head is read up to a bound and within a time; a body up to a bound. A client that leaves cancels
its handler at once, in silence too.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import http
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import unquote

import httptools

from llamarack.errors import BadRequest, LlamarackError, RequestTooLarge, RequestTooSlow
from llamarack.gateway import wire
from llamarack.gateway.exchange import MAX_BODY_BYTES, MAX_HEAD_BYTES, Handler
from llamarack.gateway.ids import new_id

_HEAD_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"(?im)^upgrade(?=[ \t]*:)")
_HIDDEN = b"xpgrade"
_SWEEP_S = 0.25
# After an answer that came before the body's end, what still comes is read and dropped: closing at once would make
# the kernel reset the connection, and the client would lose the answer.
_LINGER_S = 2.0
# Sent ahead of the answer to the request before; more is not read until that one is answered.
_MOST_AHEAD_BYTES = 256 * 1024
_NOT_MODIFIED = 304
_REASONS = {status.value: status.phrase for status in http.HTTPStatus}

log = logging.getLogger(__name__)


class _Clock:
    """The Date header, made once a second."""

    def __init__(self) -> None:
        self._at = 0
        self._text = ""

    def date(self) -> str:
        now = int(time.time())
        if now != self._at:
            self._at = now
            self._text = email.utils.formatdate(now, usegmt=True)
        return self._text


_CLOCK = _Clock()


class FastServer:
    """Holds the connections of one worker and ends those that are idle or slow."""

    def __init__(self, handle: Handler, *, keep_alive_s: float, head_timeout_s: float) -> None:
        self.handle = handle
        self.keep_alive_s = keep_alive_s
        self.head_timeout_s = head_timeout_s
        self.connections: set[Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    def __call__(self) -> asyncio.Protocol:
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
        return Connection(self)

    async def shutdown(self, timeout_s: float) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        tasks = [each.task for each in self.connections if each.task is not None]
        for connection in list(self.connections):
            connection.close()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    def _sweep(self) -> None:
        self._sweeping = None
        now = time.monotonic()
        for connection in list(self.connections):
            if connection.deadline_monotonic_s <= now:
                connection.close()
        if self.connections:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)


class Connection(asyncio.Protocol):
    """Reads requests one after the other; a request that comes ahead waits until the one before is answered."""

    def __init__(self, server: FastServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._ahead = bytearray()  # not given to the parser yet
        self._exchange: FastExchange | None = None  # its head is being read, or it is being answered
        self._in_head = True
        self._head_bytes = 0
        self._body_left: int | None = None  # of a body whose length is told
        self._is_paused = False
        self._lingering = False
        self.task: asyncio.Task[None] | None = None
        self.deadline_monotonic_s = time.monotonic() + server.head_timeout_s
        self.writable: asyncio.Future[None] | None = None

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._exchange is not None:
            self._exchange.broke_off()
        if self.writable is not None and not self.writable.done():
            self.writable.set_result(None)
        if self.task is not None:
            self.task.cancel()

    def eof_received(self) -> bool:
        return False  # half closed is gone

    def pause_writing(self) -> None:
        if self.writable is None:
            self.writable = asyncio.get_running_loop().create_future()
            self._tell_flow(True)

    def resume_writing(self) -> None:
        if self.writable is not None:
            if not self.writable.done():
                self.writable.set_result(None)
            self.writable = None
            self._tell_flow(False)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self.task is not None and (self._exchange is None or self._exchange.is_read):
            self._ahead += data
            if len(self._ahead) > _MOST_AHEAD_BYTES and not self._is_paused and self._transport is not None:
                self._is_paused = True
                self._transport.pause_reading()
            return
        if self._ahead:
            self._ahead += data
            data = bytes(self._ahead)
            self._ahead.clear()
        self._read(data)

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        """Gives the parser what belongs to the request at hand; keeps the rest."""
        try:
            while data:
                if self._in_head:
                    data = self._read_head(data)
                    if self._in_head:
                        self._ahead += data
                        break
                else:
                    data = self._read_body(data)
                if self._exchange is not None and self._exchange.is_read:
                    self._ahead += data
                    break
        except httptools.HttpParserUpgrade:
            if self._exchange is not None:  # CONNECT
                self._exchange.closing = True
                self._exchange.is_read = True
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, LlamarackError) else BadRequest("the request is malformed"))
            return
        except httptools.HttpParserError as error:
            self._refuse(BadRequest(f"the request is malformed: {str(error) or type(error).__name__}"))
            return
        if self.task is None and self._exchange is not None and not self._in_head:
            self._begin(self._exchange)

    def _read_head(self, data: bytes) -> bytes:
        """Whole lines only, so that the offer of an upgrade can be hidden. What is left of `data`."""
        if self._head_bytes == 0:
            data = data.lstrip(b"\r\n")
            if not data:
                return b""
            self.deadline_monotonic_s = time.monotonic() + self._server.head_timeout_s
            if data.startswith(b"PRI "):  # the parser would wait for somebody who speaks it
                raise httptools.HttpParserError("HTTP/2 without TLS is not spoken here")
        end = data.find(_HEAD_END)
        stop = end + len(_HEAD_END) if end >= 0 else data.rfind(b"\n") + 1
        if not stop and not (self._head_bytes or 65 <= data[0] <= 90):
            stop = len(data)  # no method begins so: TLS on a plain port, say
        if self._head_bytes + max(stop, len(data) if end < 0 else 0) > MAX_HEAD_BYTES:
            raise httptools.HttpParserError(f"its head is longer than {MAX_HEAD_BYTES} bytes")
        if stop:
            lines, data = data[:stop], data[stop:]
            self._head_bytes += stop
            if b"pgrade" in lines or b"PGRADE" in lines:
                lines = _UPGRADE.sub(_HIDDEN, lines)
            self._parser.feed_data(lines)
        return data

    def _read_body(self, data: bytes) -> bytes:
        exchange = self._exchange
        assert exchange is not None
        if self._body_left is None:
            self._parser.feed_data(data)
            return b""
        part, rest = data[: self._body_left], data[self._body_left :]
        self._body_left -= len(part)
        self._parser.feed_data(part)
        return rest

    def _begin(self, exchange: FastExchange) -> None:
        self.deadline_monotonic_s = float("inf")  # its handler minds the time now
        self.task = asyncio.get_running_loop().create_task(self._handle(exchange))

    async def _handle(self, exchange: FastExchange) -> None:
        try:
            await self._server.handle(exchange)
        except asyncio.CancelledError:
            pass  # the client left
        except Exception:
            log.exception("unexpected path=%s", exchange.target)
            exchange.abort()
        finally:
            self.task = None
            self._after(exchange)

    def _after(self, exchange: FastExchange) -> None:
        """The answer is out: the next request, or the end."""
        if self._transport is None or self._transport.is_closing():
            return
        if not exchange.is_ended:
            exchange.abort()
            return
        if not exchange.is_read or exchange.closing:
            self._linger()
            return
        self._exchange = None
        self._in_head = True
        self._head_bytes = 0
        self._body_left = None
        self.deadline_monotonic_s = time.monotonic() + self._server.keep_alive_s
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        if self._ahead:
            data = bytes(self._ahead)
            self._ahead.clear()
            self._read(data)

    def _refuse(self, error: LlamarackError) -> None:
        """What is no request gets the one error form; where its handler runs, that answers."""
        if self._exchange is not None and not self._in_head and self.task is not None:
            self._exchange.refuse(error)
            return
        if self._transport is None or self.task is not None:
            self.close()
            return
        body = wire.error_body(error)
        head = {"Content-Type": wire.JSON_TYPE, "x-request-id": new_id(), "Connection": "close"}
        self._transport.write(head_bytes(error.http_status, {**head, "Content-Length": str(len(body))}) + body)
        self._linger()

    def _linger(self) -> None:
        assert self._transport is not None
        self._lingering = True
        self._ahead.clear()
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        self.deadline_monotonic_s = time.monotonic() + _LINGER_S
        if self._exchange is not None and self._exchange.is_read:
            self._transport.close()  # nothing unread can make the kernel reset it
        elif self._transport.can_write_eof():
            with contextlib.suppress(OSError, RuntimeError):
                self._transport.write_eof()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _tell_flow(self, clogged: bool) -> None:
        if self._exchange is not None and self._exchange.on_flow is not None:
            self._exchange.on_flow(clogged)

    # -- httptools ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._exchange is not None:  # behind a chunked body in the same piece: its sender must wait for the answer
            self._exchange.closing = True
            return
        self._exchange = FastExchange(self)

    def on_url(self, url: bytes) -> None:
        if self._exchange is not None and not self._exchange.is_read:
            self._exchange.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.is_read or not self._in_head:
            return
        known = name.decode("latin-1").lower()
        if known == "xpgrade":
            known = "upgrade"
        exchange.take_header(known, value.decode("latin-1").strip())

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or exchange.is_read or not self._in_head:
            return
        exchange.take_head(
            self._parser.get_method().decode("latin-1"),
            self._parser.get_http_version(),
            self._parser.should_keep_alive(),
        )
        length = exchange.headers.get("content-length")
        if length is not None and "transfer-encoding" not in exchange.headers:
            self._body_left = int(length)  # digits: the parser has seen to it
        self._in_head = False

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None and not self._exchange.is_read:
            self._exchange.take_body(data)

    def on_message_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.body_ended()


class FastExchange:
    """`exchange.Exchange` of a `Connection`."""

    def __init__(self, connection: Connection) -> None:
        self.method = ""
        self.target = ""
        self.path = ""
        self.url = b""
        self._headers: dict[str, str] = {}
        self.headers: Mapping[str, str] = self._headers
        self.status: int | None = None
        self.closing = False
        self.on_flow: Callable[[bool], None] | None = None
        self.is_read = False
        self.is_ended = False
        self._connection = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._fault: LlamarackError | None = None
        self._news: asyncio.Future[None] | None = None
        self._chunked = True

    # -- what the connection tells ------------------------------------------------------------------------------

    def take_header(self, name: str, text: str) -> None:
        self._headers[name] = f"{self._headers[name]}, {text}" if name in self._headers else text

    def take_head(self, method: str, version: str, keeps_alive: bool) -> None:
        self.method = method
        self.target = self.url.decode("latin-1")
        if not self.target.isascii() or not self.target.isprintable():
            raise BadRequest("the request is malformed: its path is not ASCII")
        path = self.target
        if not path.startswith("/") and method != "CONNECT" and path != "*":
            parsed = httptools.parse_url(self.url)
            path = (parsed.path or b"/").decode("latin-1")
        self.path = unquote(path.partition("?")[0], errors="replace")
        self.closing = not keeps_alive
        self._chunked = version != "1.0"

    def take_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_BODY_BYTES:
            self.refuse(_too_large())
        elif self._fault is None:
            self._parts.append(data)

    def body_ended(self) -> None:
        self.is_read = True
        self._wake()

    def refuse(self, error: LlamarackError) -> None:
        self._fault = self._fault or error
        self.closing = True
        self._parts.clear()
        self._wake()

    def broke_off(self) -> None:
        self._fault = self._fault or BadRequest("the body cannot be read: the client closed the connection")
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # -- exchange.Exchange --------------------------------------------------------------------------------------

    @property
    def is_clogged(self) -> bool:
        return self._connection.writable is not None

    async def body(self, timeout_s: float) -> bytes:
        if int(self.headers.get("content-length", "0") or 0) > MAX_BODY_BYTES:
            raise _too_large()
        if not self.is_read and self._fault is None:
            self._news = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news
            except TimeoutError:
                raise RequestTooSlow(f"the body did not come within {timeout_s:g} s") from None
        if self._fault is not None:
            raise self._fault
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def go_on(self) -> None:
        self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        length = {} if status == _NOT_MODIFIED else {"Content-Length": str(len(body))}  # that would be the file's
        head = head_bytes(status, {**headers, **length, **self._connection_header()})
        self._connection.write(head if self.method == "HEAD" else head + body)
        self.is_ended = True

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        if not self._chunked:
            self.closing = True
        framing = {"Transfer-Encoding": "chunked"} if self._chunked else {}
        self._connection.write(head_bytes(status, {**headers, **framing, **self._connection_header()}))

    def write(self, data: bytes) -> None:
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        self.is_ended = True

    def abort(self) -> None:
        self._connection.abort()

    async def drained(self) -> None:
        if self._connection.writable is not None:
            await self._connection.writable

    def _connection_header(self) -> dict[str, str]:
        if not self.is_read:
            self.closing = True
        return {"Connection": "close"} if self.closing else {}


def head_bytes(status: int, headers: Mapping[str, str]) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    reason = _REASONS.get(status, "Status")
    return f"HTTP/1.1 {status} {reason}\r\nDate: {_CLOCK.date()}\r\n{lines}\r\n".encode("latin-1", "replace")


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
