"""Requests to an engine and its replies. Plain asyncio protocols, since this is where every token passes.

A connection is used again only for engines that serve any number of idle ones (`Deviations.keeps_connections`), and a
request that a used one does not answer at all is sent once more over a fresh one: only if that fails too has the
engine broken off. See docs/decisions/002.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from llamarack.engine.dialect import Endpoint
from llamarack.gateway.turns import Turns

# A reply head may take as long as a prefill; the request's own deadline ends it.
_CONNECT_TIMEOUT_S = 5.0
_HIGH_WATER_BYTES = 256 * 1024
_MOST_HEADS = 256
_MOST_IDLE = 256  # connections kept to one engine
# Of a reply whose last event was passed on: the end of its framing is on its way.
_END_PATIENCE_S = 1.0

Sink = Callable[[bytes], bool]
Note = Callable[["EngineReply"], None]
Listener = Callable[["EngineReply"], None]


class EngineBroke(Exception):
    """The connection failed or ended early: the engine died, was killed, or lost the request."""


class NotTaken(EngineBroke):
    """The engine never had the request: it accepts no connection, or it is not the one that was meant."""


class EngineReply(asyncio.Protocol):
    """A connection and the reply that is on it. `status` is there once `post` returned it; the body goes to `pump` or
    comes from `read`. Always `close` it, once."""

    def __init__(self, request: bytes, pool: Engines | None, key: str) -> None:
        self._pool = pool
        self._key = key
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._lost = False
        self._begin(request)

    def _begin(self, request: bytes, listener: Listener | None = None) -> None:
        self.status = 0
        self.fault: Exception | None = None
        self.is_ended = False
        self.listener = listener
        self._request = request
        self._over: asyncio.Future[None] | None = None  # somebody waits for the head, or for the end of the body
        self._wants_head = False
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._is_paused = False
        self._framed = False  # by length or chunks; else the end of the connection ends the body
        self._keeps_alive = False
        self._heard = False
        self._closed = False
        self._is_over = False  # the sink wanted no more
        self._turns: Turns | None = None  # what comes waits for its turn
        self._came: list[bytes] = []  # and waits
        self._waits_for_end: asyncio.TimerHandle | None = None

    async def head(self) -> None:
        """Waits for the status. Raises EngineBroke."""
        if not self.status and self.fault is None:
            self._wants_head = True
            self._over = asyncio.get_running_loop().create_future()
            await self._over
        if not self.status and self.fault is not None:
            raise self.fault

    async def pump(self, sink: Sink) -> None:
        """Calls `sink` with each piece of the body as it arrives, until that returns True or the body ends. Raises
        EngineBroke where it ends early, and what `sink` raises."""
        self._sink = sink
        self.pause(False)
        if self._parts:
            self._flush()
        if self._sink is not None and self.fault is None and not self.is_ended:
            self._over = asyncio.get_running_loop().create_future()
            await self._over
        if self.fault is not None and not self._is_over:
            raise self.fault

    def pass_to(self, sink: Sink) -> None:
        """`pump` for who listens: told by `is_done` or `fault` when it is over."""
        self._sink = sink
        self._flush()

    def give_way(self) -> None:
        """From here on what comes waits for its turn: somebody waits for the first token of another."""
        if self._pool is not None:
            self._turns = self._pool.turns

    def pass_on(self) -> None:
        """All that came and waited."""
        data = self._came[0] if len(self._came) == 1 else b"".join(self._came)
        self._came.clear()
        if data:
            self._take(data)

    async def read(self) -> bytes:
        """The whole body. Raises EngineBroke where it ends early."""
        self.pause(False)
        if self.fault is None and not self.is_ended:
            self._over = asyncio.get_running_loop().create_future()
            await self._over
        if self.fault is not None:
            raise self.fault
        return self.whole()

    def whole(self) -> bytes:
        """The body of one that ended."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    @property
    def is_done(self) -> bool:
        """The sink has all that it wants."""
        return self._is_over or self.is_ended

    def pause(self, paused: bool) -> None:
        """Stops and goes on reading: a client that does not read must not fill this process."""
        if self._transport is None or paused == self._is_paused or self._lost:
            return
        self._is_paused = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def break_off(self, error: Exception) -> None:
        """Ends the waiting for it with `error`."""
        self._break(error)

    def close(self) -> None:
        """Drops the connection, so that an engine still at work sees it and frees the slot; keeps one at its end."""
        if self._closed:
            return
        self._closed = True
        self._sink = None
        self.listener = None
        self._turns = None
        self._came.clear()
        if self._pool is None or self.fault is not None or not self._framed or self._lost:
            self.drop()
        elif self.is_ended:
            self._keep()
        elif self._is_over:  # but for its framing
            loop = asyncio.get_running_loop()
            self._waits_for_end = loop.call_later(_END_PATIENCE_S, self.drop)
        else:
            self.drop()

    def take_request(self, request: bytes, listener: Listener | None = None) -> bool:
        """A kept connection begins another exchange; False when it has ended meanwhile."""
        if self._lost or self._transport is None or self._transport.is_closing():
            return False
        self._begin(request, listener)
        self._transport.write(request)
        return True

    def drop(self) -> None:
        if self._waits_for_end is not None:
            self._waits_for_end.cancel()
            self._waits_for_end = None
        if self._transport is not None:
            self._transport.abort()

    def _keep(self) -> None:
        if self._waits_for_end is not None:
            self._waits_for_end.cancel()
            self._waits_for_end = None
        assert self._pool is not None
        if self._keeps_alive and not self._is_paused:
            self._pool.keep(self._key, self)
        else:
            self.drop()

    def _flush(self) -> None:
        """What came in one piece from the engine goes on in one piece."""
        if self._sink is None or not self._parts:
            return
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._held_bytes = 0
        try:
            over = self._sink(data)
        except Exception as error:
            self._break(error)
            return
        if over:
            self._sink = None
            self._is_over = True
            if self.listener is None:
                self._tell()

    def _break(self, fault: Exception) -> None:
        if self.is_ended or self.fault is not None:
            return
        self.fault = fault
        self._tell()

    def _tell(self) -> None:
        """Head, end or fault, to whoever waits or listens."""
        if self.listener is not None:
            self.listener(self)
        elif self._over is not None:
            waiting, self._over = self._over, None
            if not waiting.done():
                waiting.set_result(None)

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._closed and self._waits_for_end is None:  # between two exchanges an engine has nothing to say
            self.drop()
            return
        if self._turns is None:
            self._take(data)
            return
        if not self._came:
            self._turns.await_turn(self)
        self._came.append(data)

    def _take(self, data: bytes) -> None:
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(EngineBroke(f"its reply is not HTTP: {error}"))
            self.drop()
            return
        if self._sink is not None:
            self._flush()
        if self.listener is not None:
            if self._sink is None or self.is_ended:
                self.listener(self)
        elif self._waits_for_end is not None:
            if self.is_ended:
                self._keep()
        elif self.is_ended or (self._wants_head and self.status):
            self._wants_head = False
            self._tell()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self.pass_on()
        if self._pool is not None:
            self._pool.forget(self._key, self)
        if self._waits_for_end is not None:
            self._waits_for_end.cancel()
        if self.status and not self._framed and error is None:
            self.is_ended = True
            self._tell()
        self._break(EngineBroke(str(error) if error else "it closed the connection"))

    # -- httptools ----------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._keeps_alive = self._parser.should_keep_alive()  # forgotten by the parser at the message's end

    def on_body(self, data: bytes) -> None:
        if self._closed:
            return
        self._parts.append(data)
        if self._sink is None:
            self._held_bytes += len(data)
            if self._held_bytes > _HIGH_WATER_BYTES and self._over is None and self.listener is None:
                self.pause(True)  # until somebody reads

    def on_message_complete(self) -> None:
        self.is_ended = True

    @property
    def said_nothing(self) -> bool:
        return not self._heard


def _nobody(reply: EngineReply) -> None:
    pass


class Engines:
    """The connections of one worker that wait for their next request."""

    def __init__(self) -> None:
        self._idle: dict[str, list[EngineReply]] = {}
        self._heads: dict[tuple[str, str], str] = {}  # by endpoint key and path
        self.turns = Turns()

    async def post(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        headers: dict[str, str],
        *,
        keeps: bool = False,
        note: Note = _nobody,
    ) -> EngineReply:
        """The reply once its head is there; the caller closes it. `keeps`: the engine bears idle connections. `note` is
        told of the connection before it has answered. Raises EngineBroke."""
        request = self._request(endpoint, path, body, headers, keeps=keeps)
        if keeps:
            reply = await self._over_a_kept_one(endpoint.key, request, note)
            if reply is not None:
                return reply
        return await _exchange(endpoint, request, self if keeps else None, note)

    def post_now(
        self, endpoint: Endpoint, path: str, body: bytes, headers: dict[str, str], listener: Listener
    ) -> EngineReply | None:
        """On a kept connection, without waiting for the head; None where there is none. `listener`: told of each piece
        of the reply that no sink takes, of its end, and of a fault."""
        idle = self._idle.get(endpoint.key)
        if not idle:
            return None
        request = self._request(endpoint, path, body, headers, keeps=True)
        while idle:
            reply = idle.pop()
            if reply.take_request(request, listener):
                return reply
        return None

    async def _over_a_kept_one(self, key: str, request: bytes, note: Note) -> EngineReply | None:
        idle = self._idle.get(key)
        while idle:
            reply = idle.pop()
            if not reply.take_request(request):
                continue
            note(reply)
            try:
                await reply.head()
                return reply
            except EngineBroke:
                if not reply.said_nothing:
                    raise
                reply.close()
                return None  # it was closed for being idle, most likely; a fresh one tells
            except BaseException:
                reply.close()
                raise
        return None

    def _request(self, endpoint: Endpoint, path: str, body: bytes, headers: dict[str, str], *, keeps: bool) -> bytes:
        start = self._heads.get((endpoint.key, path))
        if start is None:
            if len(self._heads) >= _MOST_HEADS:  # of engines that are gone
                self._heads.clear()
            start = self._heads[endpoint.key, path] = _head("POST", endpoint, path, keeps=keeps)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        return f"{start}Content-Length: {len(body)}\r\n{lines}\r\n".encode("latin-1", "replace") + body

    def keep(self, key: str, reply: EngineReply) -> None:
        idle = self._idle.setdefault(key, [])
        idle.append(reply)
        if len(idle) > _MOST_IDLE:
            idle.pop(0).drop()

    def forget(self, key: str, reply: EngineReply) -> None:
        idle = self._idle.get(key)
        if idle is not None and reply in idle:
            idle.remove(reply)
            if not idle:
                del self._idle[key]

    def close(self) -> None:
        for idle in list(self._idle.values()):
            for reply in list(idle):
                reply.drop()


async def post(endpoint: Endpoint, path: str, body: bytes, headers: dict[str, str]) -> EngineReply:
    """One exchange on a connection of its own."""
    return await Engines().post(endpoint, path, body, headers)


async def get_text(endpoint: Endpoint, path: str, timeout_s: float) -> str | None:
    """The text of a 200 reply, None for anything else."""
    try:
        async with asyncio.timeout(timeout_s):
            reply = await _exchange(endpoint, f"{_head('GET', endpoint, path)}\r\n".encode(), None)
            try:
                return (await reply.read()).decode(errors="replace") if reply.status == 200 else None
            finally:
                reply.close()
    except (EngineBroke, TimeoutError):
        return None


def _head(method: str, endpoint: Endpoint, path: str, *, keeps: bool = False) -> str:
    close = "" if keeps else "Connection: close\r\n"
    kind = "Content-Type: application/json\r\n" if method == "POST" else ""
    return f"{method} {path} HTTP/1.1\r\nHost: engine\r\n{close}{kind}Authorization: Bearer {endpoint.key}\r\n"


async def _exchange(endpoint: Endpoint, request: bytes, pool: Engines | None, note: Note = _nobody) -> EngineReply:
    loop = asyncio.get_running_loop()

    def protocol() -> EngineReply:
        return EngineReply(request, pool, endpoint.key)

    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            if endpoint.socket is not None:
                _, reply = await loop.create_unix_connection(protocol, str(endpoint.socket))
            else:
                assert endpoint.port is not None  # an endpoint has one of the two
                _, reply = await loop.create_connection(protocol, "127.0.0.1", endpoint.port)
    except (OSError, TimeoutError) as error:
        raise NotTaken(str(error) or "it does not accept connections") from error
    note(reply)
    try:
        await reply.head()
    except BaseException:
        reply.close()
        raise
    return reply
