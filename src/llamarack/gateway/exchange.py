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

    def abort(self) -> None:
        """Breaks the connection, so that a begun answer is not taken for a whole one."""

    async def drained(self) -> None: ...


Handler = Callable[[Exchange], Awaitable[None]]


class HttpServer(Protocol):
    """Makes the protocol of each connection: what `loop.create_server` wants."""

    def __call__(self) -> asyncio.Protocol: ...

    async def shutdown(self, timeout_s: float) -> None:
        """Ends all connections and waits for their handlers."""


def waits_to_continue(exchange: Exchange) -> bool:
    return exchange.headers.get("expect", "").lower() == "100-continue"


def offers_websocket(exchange: Exchange) -> bool:
    return exchange.headers.get("upgrade", "").lower() == "websocket"
