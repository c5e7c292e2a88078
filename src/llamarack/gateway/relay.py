"""One user request to an engine and back: admitted, sent, retried while nothing has been passed on, cancelled with
its client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from llamarack.config import Gateway
from llamarack.engine import ADAPTORS
from llamarack.errors import DeadlineExceeded, LlamarackError, Overloaded, RequestError, UpstreamFailed
from llamarack.gateway import upstream, wire
from llamarack.gateway.admission import Admission, Reservation
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.outcomes import Outcomes
from llamarack.gateway.stream import EventTooLong, StreamFilter
from llamarack.gateway.upstream import EngineBroke, EngineReply
from llamarack.supervise.table import ReplicaRow

# Time for the engine to refuse a bad request with its own status before the 200 of a stream is committed.
_COMMIT_AFTER_S = 1.0
_MAX_ATTEMPTS = 4
# A request in the queue has no status yet: a 503 is what every client knows to retry, an event inside a 200 is not.
# Past this, with a longer `max_queue_s`, headers and keep-alives go out: LangChain4j gives up after 60 s without any.
_QUEUE_PATIENCE_S = 45.0
# A replica that broke off but still counts as ready gets the request again after this; the supervisor has had time
# to notice a death.
_FORGIVE_AFTER_S = 2.0
# Loading, or another life of the engine, whose key is not the one that the table told: the client is at no fault.
_NOT_THIS_ENGINE = frozenset({401, 503})
# A client that reads nothing would hold the last event, and with it the request, for ever.
_LAST_WRITE_S = 5.0

log = logging.getLogger(__name__)


class ClientLeft(ConnectionError):
    """The client closed its connection while it was written to."""


@dataclass(slots=True)
class Call:
    """One request on its way. `engine_path`: where the engine takes it; `chat`: the shape of its stream."""

    request: web.BaseRequest
    request_id: str
    model: str
    engine_path: str
    body: bytes
    chat: bool
    stream: bool
    hide_usage: bool
    arrived_monotonic_s: float
    replica: str | None = None
    first_event_s: float | None = None
    streamed_events: int = 0  # of a stream that came to its end
    usage: dict[str, Any] = field(default_factory=dict)


class Relay:
    def __init__(self, settings: Gateway, admission: Admission, metrics: Metrics) -> None:
        self.settings = settings
        self.outcomes = Outcomes()
        self._admission = admission
        self._metrics = metrics

    async def serve(self, call: Call) -> web.StreamResponse:
        """The finished answer. Raises RequestError only while nothing was sent to the client; ClientLeft."""
        return await (self._streamed(call) if call.stream else self._whole(call))

    async def _whole(self, call: Call) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                return await self._with_retries(call, None, self._whole_attempt)
        except TimeoutError:
            raise self._out_of_time() from None

    async def _streamed(self, call: Call) -> web.StreamResponse:
        client = ClientStream(call, self.settings)
        keeping_alive = asyncio.create_task(client.keep_alive())
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                return await self._with_retries(call, client, self._stream_attempt)
        except (TimeoutError, RequestError) as error:
            failure = error if isinstance(error, RequestError) else self._out_of_time()
            if not client.committed:
                raise failure from None
            await client.fail(failure)
            return client.response
        finally:
            keeping_alive.cancel()

    async def _with_retries(self, call: Call, client: ClientStream | None, attempt: Any) -> web.StreamResponse:
        broke: set[str] = set()
        for number in range(_MAX_ATTEMPTS):
            reservation = await self._take(call, broke, again=number > 0)
            replica = reservation.row
            if client is not None:
                client.admitted.set()
            call.replica = replica.id
            admitted_s = time.monotonic() - call.arrived_monotonic_s
            try:
                response: web.StreamResponse = await attempt(call, replica, client)
                failed = response.status >= 500 or (client is not None and client.failed)
                first_s = None if call.first_event_s is None else call.first_event_s - admitted_s
                self.outcomes.count(replica.id, failed=failed, first_token_s=first_s)
                return response
            except EngineBroke as error:
                self.outcomes.count(replica.id, failed=True)
                assert replica.endpoint is not None
                broke.add(replica.endpoint.key)
                if client is not None and client.passed_events:
                    raise UpstreamFailed(
                        f"the engine broke off after {client.passed_events} events", should_retry=True
                    ) from error
                log.warning("engine_broke request=%s replica=%s error=%s", call.request_id, replica.id, error)
                self._metrics.retries.labels(call.model).inc()
            finally:
                self._admission.give(reservation)
        raise UpstreamFailed(f"{_MAX_ATTEMPTS} engines broke off before their first token", retry_after_s=2)

    async def _take(self, call: Call, broke: set[str], *, again: bool) -> Reservation:
        started = time.monotonic()
        if not again:
            reservation = await self._admission.take(call.model)
            self._metrics.queue_wait.labels(call.model).observe(time.monotonic() - started)
            return reservation
        try:
            return await self._admission.take(call.model, excluded=broke, again=True, wait_s=_FORGIVE_AFTER_S)
        except Overloaded:
            return await self._admission.take(call.model, again=True)

    async def _whole_attempt(self, call: Call, replica: ReplicaRow, _: ClientStream | None) -> web.StreamResponse:
        response = await self._send(call, replica)
        try:
            body = await response.read()
        finally:
            response.close()
        if response.status != 200:
            return self._refused(call, response.status, body)
        with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
            call.usage = orjson.loads(body).get("usage") or {}
        return json_response(200, wire.with_closed_reasons(body), call.request_id)

    async def _stream_attempt(self, call: Call, replica: ReplicaRow, client: ClientStream | None) -> web.StreamResponse:
        assert client is not None
        response = await self._send(call, replica)
        try:
            if response.status != 200:
                return await self._stream_refused(call, client, response)
            await client.commit()
            events = StreamFilter(ADAPTORS[replica.engine].deviations, hide_usage=call.hide_usage)
            async for chunk in response.chunks():
                data = events.feed(chunk)
                self._metrics.traffic.count_tokens(call.model, events.state.passed_events - client.passed_events)
                client.passed_events = events.state.passed_events
                if data:
                    if call.first_event_s is None:
                        call.first_event_s = time.monotonic() - call.arrived_monotonic_s
                    await client.write(data)
                if events.over():
                    break
            call.usage, call.streamed_events = events.state.usage or {}, client.passed_events
            if events.state.error is not None:
                await client.fail_with(events.state.error)
            elif not events.state.done:
                raise EngineBroke("its stream ended without [DONE]")
            else:
                await client.finish()
            return client.response
        except EventTooLong as error:
            raise EngineBroke("it sends no event boundary") from error
        finally:
            response.close()  # an engine notices the closed connection and frees the slot

    async def _send(self, call: Call, replica: ReplicaRow) -> EngineReply:
        assert replica.endpoint is not None
        headers = {"X-Request-Id": call.request_id}
        for name in ("traceparent", "tracestate"):
            if name in call.request.headers:
                headers[name] = call.request.headers[name]
        response = await upstream.post(replica.endpoint, call.engine_path, call.body, headers)
        if response.status in _NOT_THIS_ENGINE:
            response.close()
            raise EngineBroke(f"it answers {response.status}")
        return response

    async def _stream_refused(self, call: Call, client: ClientStream, response: EngineReply) -> web.StreamResponse:
        body = await response.read()
        if not client.committed:
            return self._refused(call, response.status, body)
        await client.fail_with(wire.engine_error_envelope(response.status, body))
        return client.response

    def _refused(self, call: Call, status: int, body: bytes) -> web.StreamResponse:
        value = wire.engine_error_envelope(status, body)
        answer = json_response(status, orjson.dumps(value), call.request_id)
        if status >= 500:
            answer.headers["x-should-retry"] = "false"  # the same prompt meets the same fault
        return answer

    def _out_of_time(self) -> RequestError:
        return DeadlineExceeded(f"not finished within {self.settings.request_timeout_s:g} s", should_retry=False)


class ClientStream:
    """The client's side of a stream: committed late, kept alive, ended in one of two forms."""

    def __init__(self, call: Call, settings: Gateway) -> None:
        self._call = call
        self._heartbeat = settings.heartbeat
        self._last_write = time.monotonic()
        self._busy = False  # a write waits for the client, or the end was written: no heartbeat may follow it
        self._committing = asyncio.Lock()
        self.admitted = asyncio.Event()
        self.passed_events = 0
        self.committed = False
        self.failed = False  # ended with an error event
        self.response = web.StreamResponse(status=200, headers={**wire.STREAM_HEADERS, "x-request-id": call.request_id})

    async def commit(self) -> None:
        """Sends status and headers; from here on errors are events."""
        async with self._committing:
            if not self.committed:
                self.committed = True
                with _client_side():
                    await self.response.prepare(self._call.request)

    async def write(self, data: bytes) -> None:
        self._last_write = time.monotonic()
        self._busy = True
        with _client_side():
            await self.response.write(data)
        self._busy = False

    async def finish(self) -> None:
        self._busy = True
        with _client_side():
            await self.response.write_eof()

    async def fail(self, error: LlamarackError) -> None:
        await self._end_with(wire.error_event(error))

    async def fail_with(self, value: dict[str, Any]) -> None:
        await self.commit()
        await self._end_with(b"event: error\ndata: " + orjson.dumps(value) + wire.EVENT_END)

    async def _end_with(self, event: bytes) -> None:
        """Aborts where no event can be sent: the client must see a broken body and not a short, complete one."""
        self.failed = True
        if self._busy:  # it does not read; a drain of aiohttp that was given up cannot be waited for again
            self._abort()
            return
        try:
            async with asyncio.timeout(_LAST_WRITE_S):
                await self.write(event)
                await self.finish()
        except (ConnectionError, RuntimeError, TimeoutError):
            self._abort()

    def _abort(self) -> None:
        if self._call.request.transport is not None:
            self._call.request.transport.abort()

    async def keep_alive(self) -> None:
        """Commits once the engine had its chance to refuse, or before a client in the queue loses patience."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUEUE_PATIENCE_S):
                await self.admitted.wait()
                await asyncio.sleep(_COMMIT_AFTER_S)
        with contextlib.suppress(ConnectionError):
            await self.commit()
            while self._heartbeat.style != "off":
                due_s = self._last_write + self._heartbeat.interval_s - time.monotonic()
                if due_s <= 0 and not self._busy:
                    await self.write(self._beat())
                else:
                    await asyncio.sleep(due_s if due_s > 0 else self._heartbeat.interval_s)

    def _beat(self) -> bytes:
        if self._heartbeat.style == "comment":
            return wire.COMMENT_HEARTBEAT
        call = self._call
        return wire.empty_delta(f"chatcmpl-{call.request_id}", int(time.time()), call.model, chat=call.chat)


@contextlib.contextmanager
def _client_side() -> Iterator[None]:
    """aiohttp raises the same ClientError for either side of a relay."""
    try:
        yield
    except ConnectionError as error:
        raise ClientLeft from error


def json_response(status: int, body: bytes, request_id: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status,
        body=body,
        headers={"Content-Type": wire.JSON_TYPE, "x-request-id": request_id, **(headers or {})},
    )
