"""A request on a `http_server.Connection` and its answer: bodies in, heads and chunks out."""

from __future__ import annotations

import asyncio
import email.utils
import http
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from llamarack.errors import BadRequest, LlamarackError, RequestTooLarge, RequestTooSlow
from llamarack.gateway.exchange import MAX_BODY_BYTES, Handler, Head

_NOT_MODIFIED = 304
_REASONS = {status.value: status.phrase for status in http.HTTPStatus}


class Wire(Protocol):
    """What an exchange needs of its connection. `writable`: there while the client does not read."""

    writable: asyncio.Future[None] | None

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...

    def over(self, exchange: FastExchange) -> None: ...

    def carry_on(self, exchange: FastExchange, rest: Handler) -> None: ...


class FastExchange:
    """`exchange.OpenExchange` of a connection. `length_bytes`: of the body, where the head tells."""

    status: int | None = None
    on_flow: Callable[[bool], None] | None = None
    on_left: Callable[[], None] | None = None
    is_read = False
    is_ended = False
    _size = 0
    _body: bytes = b""
    _parts: list[bytes] | None = None  # of a body that comes in several pieces
    _fault: LlamarackError | None = None
    _news: asyncio.Future[None] | None = None
    _held: list[bytes] | None = None

    def __init__(self, connection: Wire, head: Head, length_bytes: int | None) -> None:
        self.head = head
        self.method = head.method
        self.target = head.target
        self.path = head.path
        self.headers: Mapping[str, str] = head.headers
        self.closing = not head.keeps_alive
        self._length_bytes = length_bytes
        self._connection = connection

    # -- what the connection tells ------------------------------------------------------------------------------

    def take_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_BODY_BYTES:
            self.refuse(_too_large())
        elif self._fault is None:
            if self._parts is None:
                self._parts = [data]
            else:
                self._parts.append(data)

    def body_ended(self) -> None:
        self.is_read = True
        if self._parts is not None:
            self._body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts = None
        self._wake()

    def take_whole_body(self, data: bytes) -> None:
        self._body = data
        self.is_read = True

    def refuse(self, error: LlamarackError) -> None:
        self._fault = self._fault or error
        self.closing = True
        self._parts = None
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
        if self._length_bytes is not None and self._length_bytes > MAX_BODY_BYTES:
            raise _too_large()
        if not self.is_read and self._fault is None:
            self._news = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news
            except TimeoutError:
                raise RequestTooSlow(f"the body did not come within {timeout_s:g} s") from None
        return self.whole_body()

    def whole_body(self) -> bytes:
        if self._fault is not None:
            raise self._fault
        return self._body

    def go_on(self) -> None:
        self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        length = "" if status == _NOT_MODIFIED else f"Content-Length: {len(body)}\r\n"  # that would be the file's
        head = head_bytes(status, headers, length + self._connection_line())
        self._connection.write(head if self.method == "HEAD" else head + body)
        self.is_ended = True

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        framing = "Transfer-Encoding: chunked\r\n"
        if not self.head.is_chunkable:
            self.closing = True
            framing = ""
        self._put(head_bytes(status, headers, framing + self._connection_line()))

    def write(self, data: bytes) -> None:
        if self.head.is_chunkable:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._held is None:
            self._connection.write(data)
        else:
            self._held.append(data)

    def end(self) -> None:
        if self.head.is_chunkable:
            self._put(b"0\r\n\r\n")
        self.let_go()
        self.is_ended = True

    def hold(self) -> None:
        if self._held is None:
            self._held = []

    def let_go(self) -> None:
        held, self._held = self._held, None
        if held:
            self._connection.write(b"".join(held))

    def _put(self, data: bytes) -> None:
        if self._held is None:
            self._connection.write(data)
        else:
            self._held.append(data)

    def abort(self) -> None:
        self._connection.abort()

    async def drained(self) -> None:
        if self._connection.writable is not None:
            await self._connection.writable

    def _connection_line(self) -> str:
        if not self.is_read:
            self.closing = True
        return "Connection: close\r\n" if self.closing else ""

    # -- exchange.OpenExchange ----------------------------------------------------------------------------------

    def done(self) -> None:
        self.on_left = None
        self._connection.over(self)

    def carry_on(self, rest: Handler) -> None:
        self._connection.carry_on(self, rest)


class _Starts:
    """Status line and Date, made once a second."""

    def __init__(self) -> None:
        self._at = 0
        self._made: dict[int, str] = {}

    def of(self, status: int) -> str:
        now = int(time.time())
        if now != self._at:
            self._at = now
            self._made = {}
        start = self._made.get(status)
        if start is None:
            date = email.utils.formatdate(now, usegmt=True)
            start = self._made[status] = f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}\r\nDate: {date}\r\n"
        return start


_STARTS = _Starts()


def head_bytes(status: int, headers: Mapping[str, str], more_lines: str = "") -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{_STARTS.of(status)}{lines}{more_lines}\r\n".encode("latin-1", "replace")


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
