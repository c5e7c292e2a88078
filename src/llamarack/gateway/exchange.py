"""The seam between the gateway and its HTTP server: one request and its answer, whichever server carries them.

Two servers are behind it: `http_server` (asyncio protocols and httptools, the default) and `http_aiohttp` (the slower
reference that it is compared with; LLAMARACK_GATEWAY_HTTP=aiohttp chooses it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

MAX_BODY_BYTES = 32 * 1024**2
MAX_HEAD_BYTES = 32 * 1024


class Head:
    """What the head of a request says; names of headers in lower case. Requests with the same head share one, where the
    server remembers it (`heads`): its Content-Length is then that of the first. `kept` lives as long: the handler's own
    place for what follows from a head alone."""

    __slots__ = ("headers", "is_chunkable", "keeps_alive", "kept", "method", "path", "target")

    def __init__(
        self, method: str, target: str, path: str, headers: Mapping[str, str], *, keeps_alive: bool, is_chunkable: bool
    ) -> None:
        self.method = method
        self.target = target
        self.path = path
        self.headers = headers
        self.keeps_alive = keeps_alive
        self.is_chunkable = is_chunkable
        self.kept: object = None


class Exchange(Protocol):
    """A handler calls `answer` once, or `begin`, any number of `write` and `end`. Nothing of that waits; a handler that
    sends much asks `is_clogged` and waits in `drained`. It is cancelled in the moment in which the client leaves.

    `headers`: names in lower case. `target`: as sent, still percent-encoded. `status`: of the answer, once begun.
    `closing`: set it, and the connection ends with the answer.
    """

    method: str
    target: str
    path: str
    headers: Mapping[str, str]
    status: int | None
    closing: bool
    on_flow: Callable[[bool], None] | None

    @property
    def is_clogged(self) -> bool: ...

    async def body(self, timeout_s: float) -> bytes:
        """Raises RequestTooLarge, RequestTooSlow, BadRequest for one that breaks off or is framed wrongly."""

    def go_on(self) -> None:
        """Answers `Expect: 100-continue`."""

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None: ...

    def begin(self, status: int, headers: Mapping[str, str]) -> None: ...

    def write(self, data: bytes) -> None:
        """One chunk of a begun answer, in one piece."""

    def end(self) -> None: ...

    def hold(self) -> None:
        """What is written from here on may wait for the next `let_go` or `end`, to go out in one piece."""

    def let_go(self) -> None: ...

    def abort(self) -> None:
        """Breaks the connection, so that a begun answer is not taken for a whole one."""

    async def drained(self) -> None: ...


class OpenExchange(Exchange, Protocol):
    """One whose handler may do without a task, and then says itself when the answer is over: `done`. `on_left` is
    called once when the client leaves before that. `whole_body`: all of it is here; `carry_on`: now by a task."""

    head: Head
    on_left: Callable[[], None] | None

    def whole_body(self) -> bytes:
        """Raises what `body` raises."""

    def done(self) -> None: ...

    def carry_on(self, rest: Handler) -> None:
        """The client's leaving cancels `rest`, which must take `on_left` back once it runs; it is called before."""


Handler = Callable[[Exchange], Awaitable[None]]
# True: it is answered, or will be, without a task. Must not answer before it returns.
Opener = Callable[[OpenExchange], bool]


class HttpServer(Protocol):
    """Makes the protocol of each connection: what `loop.create_server` wants."""

    def __call__(self) -> asyncio.Protocol: ...

    async def shutdown(self, timeout_s: float) -> None:
        """Ends all connections and waits for their handlers."""


def waits_to_continue(exchange: Exchange) -> bool:
    return exchange.headers.get("expect", "").lower() == "100-continue"


def offers_websocket(exchange: Exchange) -> bool:
    return exchange.headers.get("upgrade", "").lower() == "websocket"
