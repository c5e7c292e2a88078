"""HTTP/1.1 for clients over plain asyncio protocols and httptools: one object a connection, one task a request.

Every stock `java.net.http.HttpClient` offers `Upgrade: h2c`; httptools would drop the body that follows, so the offer
is hidden from it. A head is read up to a bound and within a time; a body up to a bound. A client that leaves cancels
its handler at once, in silence too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from typing import cast
from urllib.parse import unquote

import httptools

from llamarack.errors import BadRequest, LlamarackError
from llamarack.gateway import wire
from llamarack.gateway.exchange import MAX_HEAD_BYTES, Handler, Head, Opener
from llamarack.gateway.fast_exchange import FastExchange, head_bytes
from llamarack.gateway.heads import Heads, Known
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
_NEVER_S = float("inf")

log = logging.getLogger(__name__)


class FastServer:
    """Holds the connections of one worker and ends those that are idle or slow. `opens`: asked first for a request that
    is here whole."""

    def __init__(
        self, handle: Handler, *, opens: Opener | None = None, keep_alive_s: float, head_timeout_s: float
    ) -> None:
        self.handle = handle
        self.opens = opens
        self.heads = Heads()
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
        self._exchange: FastExchange | None = None  # its head is there; its body is being read, or it is being answered
        self._known: Known | None = None  # the head before
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_bytes = 0  # of a head that came in part
        self._body_left: int | None = None  # of a body whose length is told
        self._is_parsed = True  # else its head was known, and the parser has not seen it
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
            if self._exchange.on_left is not None:
                self._exchange.on_left()
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
        if self._exchange is not None and self._exchange.is_read:
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
                if self._exchange is None:
                    data = self._read_head(data)
                    if self._exchange is None:
                        self._ahead += data
                        break
                else:
                    data = self._read_body(data)
                if self._exchange is not None and self._exchange.is_read:
                    if data:
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
        if self.task is None and self._exchange is not None:
            self._begin(self._exchange)

    def _read_head(self, data: bytes) -> bytes:
        """Whole lines only, so that the offer of an upgrade can be hidden. What is left of `data`."""
        if self._head_bytes == 0:
            found = self._known.begins(data) if self._known is not None else None
            if found is None:
                self._known = self._server.heads.find(data)
                found = self._known.begins(data) if self._known is not None else None
            if found is not None and self._known is not None:
                begin, length = found
                self._is_parsed = False
                self._body_left = length
                self._exchange = FastExchange(self, self._known.head, length)
                rest = data[begin:]
                if len(rest) != length:
                    return rest
                self._exchange.take_whole_body(rest)
                return b""
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
            is_whole = end >= 0 and not self._head_bytes
            self._head_bytes += stop
            if b"pgrade" in lines or b"PGRADE" in lines:
                lines = _UPGRADE.sub(_HIDDEN, lines)
            self._parser.feed_data(lines)
            if is_whole and self._exchange is not None and self._body_left and not self._exchange.closing:
                self._server.heads.learn(lines, self._exchange.head)
        return data

    def _read_body(self, data: bytes) -> bytes:
        exchange = self._exchange
        assert exchange is not None
        left = self._body_left
        if left is None:
            self._parser.feed_data(data)
            return b""
        if len(data) <= left:
            part, rest = data, b""
        else:
            part, rest = data[:left], data[left:]
        left = self._body_left = left - len(part)
        if self._is_parsed:
            self._parser.feed_data(part)
            return rest
        if part:
            exchange.take_body(part)
        if not left:
            exchange.body_ended()
        return rest

    def _begin(self, exchange: FastExchange) -> None:
        self.deadline_monotonic_s = _NEVER_S  # its handler minds the time now
        opens = self._server.opens
        if opens is None or not exchange.is_read or not opens(exchange):
            self.task = asyncio.get_running_loop().create_task(self._run(exchange, self._server.handle))

    async def _run(self, exchange: FastExchange, handle: Handler) -> None:
        try:
            await handle(exchange)
        except asyncio.CancelledError:
            pass  # the client left
        except Exception:
            log.exception("unexpected path=%s", exchange.target)
            exchange.abort()
        finally:
            self.task = None
            self.over(exchange)

    def carry_on(self, exchange: FastExchange, rest: Handler) -> None:
        self.task = asyncio.get_running_loop().create_task(self._run(exchange, rest))

    def over(self, exchange: FastExchange) -> None:
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
        self._head_bytes = 0
        self._is_parsed = True
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
        if self._exchange is not None and self.task is not None:
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
        self._url = b""
        self._headers = {}

    def on_url(self, url: bytes) -> None:
        if self._exchange is None:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            return
        known = name.decode("latin-1").lower()
        if known == "xpgrade":
            known = "upgrade"
        text = value.decode("latin-1").strip()
        headers = self._headers
        headers[known] = f"{headers[known]}, {text}" if known in headers else text

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            return
        length = self._headers.get("content-length")
        is_chunked = "transfer-encoding" in self._headers
        self._body_left = int(length) if length is not None and not is_chunked else None  # digits: the parser saw to it
        self._exchange = FastExchange(self, self._head(), int(length) if length is not None else None)

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None and not self._exchange.is_read:
            self._exchange.take_body(data)

    def on_message_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.body_ended()

    def _head(self) -> Head:
        """Raises BadRequest for a target that is not ASCII."""
        method = self._parser.get_method().decode("latin-1")
        target = self._url.decode("latin-1")
        if not target.isascii() or not target.isprintable():
            raise BadRequest("the request is malformed: its path is not ASCII")
        path = target
        if not path.startswith("/") and method != "CONNECT" and path != "*":
            path = (httptools.parse_url(self._url).path or b"/").decode("latin-1")
        return Head(
            method,
            target,
            unquote(path.partition("?")[0], errors="replace"),
            self._headers,
            keeps_alive=self._parser.should_keep_alive(),
            is_chunkable=self._parser.get_http_version() != "1.0",
        )
