"""One request -> one `RequestRecord`, over connections that are kept open between requests.

`sent` is stamped on a connection that is already open: the time to open it counts from the scheduled time only, as it
would for a client that keeps a pool. Cancelled requests close their connection, so that the server sees them go.

A kept connection that closes without a byte of response was closed before the request: it is sent again on a new one,
once, and from then on no connection is kept (llama.cpp promises `Keep-Alive: timeout=5` and closes after each stream).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import orjson

from llamarack.measure.connection import Connection, connect
from llamarack.measure.record import ErrorKind, Phase, RequestRecord
from llamarack.measure.reply import Reply
from llamarack.measure.target import Target

# An idle connection may be closed by the server at any moment; llama.cpp closes after 5 s (`Keep-Alive: timeout=5`).
_MAX_IDLE_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to send, and how the record names it. `body`: encoded JSON."""

    index: int
    path: str
    body: bytes
    phase: Phase
    prompt_id: str
    scheduled_monotonic_ns: int
    requested_output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response that is not a stream."""

    status: int
    body: bytes
    elapsed_s: float

    def json(self) -> Any:
        """None where the body is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


class _Collector:
    """Receives one response: an event stream into `reply`, anything else into `error_body`."""

    def __init__(self, reply: Reply | None) -> None:
        self.reply = reply
        self.status: int | None = None
        self.sent_ns: int | None = None
        self.first_byte_ns: int | None = None
        self.plain = bytearray()
        self.is_whole = False
        self.renew()

    def renew(self) -> None:
        self.ended_ns: int | None = None
        self.waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def headers(self, status: int, at_ns: int) -> None:
        self.status, self.first_byte_ns = status, at_ns

    def body(self, data: bytes, at_ns: int) -> None:
        if self.reply is not None and self.status == 200:
            self.reply.feed(data, at_ns)
        else:
            self.plain += data

    def end(self, *, is_whole: bool, at_ns: int) -> None:
        self.is_whole, self.ended_ns = is_whole, at_ns
        if not self.waiter.done():
            self.waiter.set_result(None)


class Client:
    """Owns the connections of one event loop. Not shared between loops."""

    def __init__(self, target: Target, *, worker: int = 0, point: int = 0, repeat: int = 0, keep_text: bool = False):
        self.target = target
        self._ssl_context = target.ssl_context()  # reads all authorities: once, not per connection
        self._names = {"worker": worker, "point": point, "repeat": repeat}
        self._keep_text = keep_text
        self._idle: list[tuple[float, Connection]] = []
        self._keeps_connections = True
        self.connect_s: list[float] = []

    async def warm_connections(self, count: int) -> None:
        """Opens connections ahead of the first requests. Raises OSError."""
        self._idle += [(time.monotonic(), await self._connect()) for _ in range(count - len(self._idle))]

    async def stream(self, job: Job, *, timeout_s: float) -> RequestRecord:
        """Never raises for what the server or the network did: that is in the record. A cancelled call raises
        CancelledError; `stream_until` gives a record instead.
        """
        return await self.stream_until(job, timeout_s=timeout_s, stop=None)

    async def stream_until(self, job: Job, *, timeout_s: float, stop: asyncio.Event | None) -> RequestRecord:
        """Like `stream`; when `stop` is set the request is broken off and the record says `is_cancelled`."""
        reply = Reply(keep_text=self._keep_text)
        collector = _Collector(reply)
        request = self._request("POST", job.path, job.body)
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(request, collector, stop)
        except TimeoutError:
            what = "no connection" if collector.sent_ns is None else "no end"
            reply.fail(ErrorKind.TIMEOUT, f"{what} within {timeout_s:g} s")
        except OSError as error:
            reply.fail(ErrorKind.CONNECT, f"{type(error).__name__}: {error}")
        is_cancelled = collector.ended_ns is None and not reply.error_kind
        if collector.ended_ns is not None:
            _judge(collector, reply)
        return self._record(job, collector, reply, is_cancelled)

    async def call(self, method: str, path: str, value: Any = None, *, timeout_s: float) -> Answer:
        """A plain request with a JSON body or none. Raises OSError (also for a cut response) and TimeoutError."""
        started_s = time.monotonic()
        collector = _Collector(None)
        async with asyncio.timeout(timeout_s):
            body = b"" if value is None else orjson.dumps(value)
            await self._exchange(self._request(method, path, body), collector, None)
        if not collector.is_whole or collector.status is None:
            raise ConnectionResetError(f"{method} {path}: the response was cut off")
        return Answer(status=collector.status, body=bytes(collector.plain), elapsed_s=time.monotonic() - started_s)

    def close(self) -> None:
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, request: bytes, collector: _Collector, stop: asyncio.Event | None) -> None:
        """Returns at the end of the response or when `stop` is set."""
        while True:
            connection = self._take() or await self._connect()
            is_kept = connection.num_requests > 0
            try:
                collector.sent_ns = connection.send(request, collector)
                await _end_or_stop(collector, stop)
            finally:
                self._give_back(connection, is_over=collector.ended_ns is not None)
            if not is_kept or collector.ended_ns is None or collector.first_byte_ns is not None:
                return
            self._keeps_connections = False
            collector.renew()

    def _take(self) -> Connection | None:
        while self._idle:
            since_s, connection = self._idle.pop()
            is_fresh = connection.num_requests == 0 or self._keeps_connections
            if is_fresh and connection.is_reusable and time.monotonic() - since_s < _MAX_IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        started_s = time.monotonic()
        connection = await connect(self.target, self._ssl_context)
        self.connect_s.append(time.monotonic() - started_s)
        return connection

    def _give_back(self, connection: Connection, *, is_over: bool) -> None:
        if is_over and connection.is_reusable and self._keeps_connections:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.abort()

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        target = self.target
        authorization = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        head = (
            f"{method} {target.base_path}{path} HTTP/1.1\r\nHost: {target.host_header}\r\n"
            f"User-Agent: llamarack-bench\r\nAccept-Encoding: identity\r\n{authorization}"
        )
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    def _record(self, job: Job, collector: _Collector, reply: Reply, is_cancelled: bool) -> RequestRecord:
        return RequestRecord(
            index=job.index,
            **self._names,
            phase=job.phase,
            prompt_id=job.prompt_id,
            scheduled_monotonic_ns=job.scheduled_monotonic_ns,
            sent_monotonic_ns=collector.sent_ns,
            first_byte_monotonic_ns=collector.first_byte_ns,
            first_event_monotonic_ns=reply.first_event_monotonic_ns,
            finished_monotonic_ns=collector.ended_ns or time.monotonic_ns(),
            chunks=tuple(reply.chunks),
            num_events=reply.num_events,
            finish_reason=reply.finish_reason,
            http_status=collector.status,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_output_tokens=reply.num_output_tokens,
            num_cached_tokens=reply.num_cached_tokens,
            requested_output_tokens=job.requested_output_tokens,
            error_kind=reply.error_kind,
            error_detail=reply.error_detail,
            is_cancelled=is_cancelled,
            text=reply.text,
        )


def _judge(collector: _Collector, reply: Reply) -> None:
    if collector.status is None:
        reply.fail(ErrorKind.TRUNCATED, "the connection was closed without a response")
    elif collector.status != 200:
        reply.fail(ErrorKind.HTTP_STATUS, f"HTTP {collector.status}: {collector.plain.decode('utf-8', 'replace')}")
    else:
        reply.end(is_whole=collector.is_whole)


async def _end_or_stop(collector: _Collector, stop: asyncio.Event | None) -> None:
    if stop is None:
        await collector.waiter
        return
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((collector.waiter, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
