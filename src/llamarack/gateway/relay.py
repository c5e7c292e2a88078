"""One user request to an engine and back: admitted, sent, retried while nothing has been passed on, cancelled with
its client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from llamarack.config import Gateway
from llamarack.engine.dialects import DIALECTS
from llamarack.errors import DeadlineExceeded, Overloaded, RequestError, UpstreamFailed
from llamarack.gateway import wire
from llamarack.gateway.admission import Admission, Reservation
from llamarack.gateway.deadlines import Deadlines
from llamarack.gateway.demand import Demand
from llamarack.gateway.engine_watch import EngineWatch
from llamarack.gateway.exchange import Exchange
from llamarack.gateway.gathered import Gathered
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.outcomes import Outcomes
from llamarack.gateway.stream import EventTooLong, ResponsesFilter, StreamFilter, responses_usage
from llamarack.gateway.upstream import EngineBroke, EngineReply, Engines, NotTaken

# Time for the engine to refuse a bad request with its own status before the 200 of a stream is committed.
_COMMIT_AFTER_S = 1.0
# So many engines may break over one request before it is held to be the cause.
_MAX_ATTEMPTS = 4
# A replica that broke off but still counts as ready gets the request again after this; the supervisor has had time
# to notice a death.
_FORGIVE_AFTER_S = 2.0
# Loading, or another life of the engine, whose key is not the one that the table told: the client is at no fault.
_NOT_THIS_ENGINE = frozenset({401, 503})
# A client that reads nothing would hold the last event, and with it the request, for ever.
_LAST_WRITE_S = 5.0
_TICK_S = 0.25
_PASSED_ON = ("traceparent", "tracestate", "baggage")

log = logging.getLogger(__name__)


class Stuck(Exception):
    """The engine made no progress with this request for `stuck_request_s`."""


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way. `engine_path`: where the engine takes it; `shape`: of its stream."""

    exchange: Exchange
    request_id: str
    model: str
    engine_path: str
    body: bytes
    shape: str  # chat | text | responses | whole
    stream: bool
    hide_usage: bool
    demand: Demand
    deadlines: Deadlines
    arrived_monotonic_s: float
    stream_body: bytes | None = None  # for an engine that is better asked for a stream, whose events are gathered
    replica: str | None = None
    queue_s: float | None = None
    sent_monotonic_s: float | None = None
    first_event_s: float | None = None
    last_event_s: float | None = None
    streamed_events: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    asked_bytes: int = 0  # of the client's own body
    fields: Sequence[str] = ()  # names in the client's body that an engine's refusal may be about
    task: asyncio.Task[Any] | None = None
    is_late: bool = False
    has_failed: bool = False  # the engine answered with a 5xx, or with an error in its stream


@dataclass(slots=True, eq=False)
class _Running:
    """A request at an engine. `progress_monotonic_s`: when it last showed any."""

    call: Call
    reservation: Reservation
    progress_monotonic_s: float
    reply: EngineReply | None = None
    is_stuck: bool = False

    def note(self, reply: EngineReply) -> None:
        """The connection that it is on, from the moment it is sent."""
        self.reply = reply


Attempt = Callable[[Call, _Running, "ClientStream | None"], Awaitable[None]]


class Relay:
    """Owns the requests that run, and one clock for all of their heartbeats and for finding stuck ones."""

    def __init__(
        self,
        settings: Gateway,
        admission: Admission,
        metrics: Metrics,
        watch: EngineWatch,
        stuck_request_s: float,
    ) -> None:
        self.settings = settings
        self.outcomes = Outcomes()
        self._admission = admission
        self._metrics = metrics
        self._watch = watch
        self._stuck_request_s = stuck_request_s
        self._engines = Engines()
        self._calls: set[Call] = set()
        self._running: set[_Running] = set()
        self._streams: set[ClientStream] = set()
        self._ticking: asyncio.TimerHandle | None = None
        watch.suspects = self._suspects

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self._engines.close()

    async def serve(self, call: Call) -> None:
        """Answers it. Raises RequestError only while nothing was sent to the client."""
        self._tick_soon()
        if not call.stream:
            await self._in_time(call, None, self._whole_attempt)
            return
        client = ClientStream(call, self.settings.heartbeat.style)
        self._streams.add(client)
        try:
            await self._in_time(call, client, self._stream_attempt)
        except RequestError as failure:
            if not client.committed:
                raise
            await client.end_with(wire.error_event(failure))
        finally:
            self._streams.discard(client)

    async def _in_time(self, call: Call, client: ClientStream | None, attempt: Attempt) -> None:
        """What `asyncio.timeout` does, but by the one clock: a timer of its own would cost each request as much as its
        admission. Raises DeadlineExceeded."""
        task = call.task = asyncio.current_task()
        self._calls.add(call)
        try:
            await self._with_retries(call, client, attempt)
        except asyncio.CancelledError:
            if not call.is_late or task is None or task.uncancel() > 0:
                raise  # the client left
            raise DeadlineExceeded(f"not finished within {call.deadlines.total_s:g} s", should_retry=False) from None
        finally:
            self._calls.discard(call)

    async def _with_retries(self, call: Call, client: ClientStream | None, attempt: Attempt) -> None:
        """An engine that never had the request costs time and no attempt: it says nothing about the request."""
        broke: set[str] = set()
        attempts = 0
        not_taken_since_s: float | None = None
        while attempts < _MAX_ATTEMPTS:
            reservation = await self._take(call, broke, again=bool(broke))
            now = time.monotonic()
            if client is not None and client.admitted_monotonic_s is None:
                client.admitted_monotonic_s = now
            call.replica = reservation.id
            call.sent_monotonic_s = now
            running = _Running(call, reservation, now)
            self._running.add(running)
            try:
                await attempt(call, running, client)
                first_s = call.first_event_s
                if first_s is not None:
                    first_s -= now - call.arrived_monotonic_s
                self.outcomes.count(reservation.id, failed=call.has_failed, first_token_s=first_s)
                return
            except Stuck:
                self.outcomes.count(reservation.id, failed=True)
                # Not elsewhere: what one engine cannot do, the next would be stuck with too.
                self._metrics.stuck.labels(call.model).inc()
                log.warning("stuck request=%s replica=%s", call.request_id, reservation.id)
                raise DeadlineExceeded(
                    f"the engine made no progress for {self._stuck_request_s:g} s; the request was cancelled",
                    should_retry=False,
                ) from None
            except EngineBroke as error:
                self.outcomes.count(reservation.id, failed=True)
                assert reservation.row.endpoint is not None
                broke.add(reservation.row.endpoint.key)
                if client is not None and client.passed_events:
                    raise UpstreamFailed(
                        f"the engine broke off after {client.passed_events} events", should_retry=True
                    ) from error
                log.warning("engine_broke request=%s replica=%s error=%s", call.request_id, reservation.id, error)
                self._metrics.retries.labels(call.model).inc()
                if not isinstance(error, NotTaken):
                    attempts, not_taken_since_s = attempts + 1, None
                    continue
                not_taken_since_s = not_taken_since_s or time.monotonic()
                if time.monotonic() - not_taken_since_s >= call.deadlines.queue_s:
                    raise UpstreamFailed(
                        f"no engine took it within {call.deadlines.queue_s:g} s: {error}", retry_after_s=2
                    ) from error
            finally:
                self._running.discard(running)
                if running.is_stuck:
                    self._watch.hold(reservation)
                else:
                    self._admission.give(reservation)
        raise UpstreamFailed(f"{_MAX_ATTEMPTS} engines broke off before their first token", retry_after_s=2)

    async def _take(self, call: Call, broke: set[str], *, again: bool) -> Reservation:
        admission, started = self._admission, time.monotonic()
        if not again:
            reservation = await admission.take(call.model, call.demand, wait_s=call.deadlines.queue_s)
            call.queue_s = time.monotonic() - started
            self._metrics.waited(call.model, call.queue_s)
            return reservation
        try:
            return await admission.take(call.model, call.demand, excluded=broke, again=True, wait_s=_FORGIVE_AFTER_S)
        except Overloaded:
            return await admission.take(call.model, call.demand, again=True)

    async def _whole_attempt(self, call: Call, running: _Running, _: ClientStream | None) -> None:
        deviations = DIALECTS[running.reservation.row.engine].deviations
        asked = call.body if call.stream_body is None or deviations.ends_whole_answers else call.stream_body
        reply = await self._send(call, running, asked)
        try:
            if asked is call.body or reply.status != 200:
                status, body = reply.status, await reply.read()
            else:
                status, body = await _gathered(reply, running, Gathered(deviations, call.shape))
        finally:
            reply.close()
        if status != 200:
            self._refuse(call, running, status, body)
            return
        with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
            usage = orjson.loads(body).get("usage") or {}
            call.usage = responses_usage(usage) if call.shape == "responses" else usage
        call.exchange.answer(200, _json_headers(call), wire.with_closed_reasons(body))

    async def _stream_attempt(self, call: Call, running: _Running, client: ClientStream | None) -> None:
        assert client is not None
        reply = await self._send(call, running, call.body)
        exchange = call.exchange
        try:
            if reply.status != 200:
                body = await reply.read()
                if client.committed:
                    call.has_failed = reply.status >= 500
                    envelope = wire.engine_error_envelope(reply.status, body)
                    _see_death(running, envelope)
                    await client.end_with(_event(envelope))
                else:
                    self._refuse(call, running, reply.status, body)
                return
            client.commit()
            row = running.reservation.row
            events: StreamFilter | ResponsesFilter
            if call.shape == "responses":
                events = ResponsesFilter()
            else:
                events = StreamFilter(DIALECTS[row.engine].deviations, hide_usage=call.hide_usage)

            traffic = self._metrics.traffic

            def take(chunk: bytes) -> bool:
                """Straight from the engine's socket to the client's."""
                data = events.feed(chunk)
                now = running.progress_monotonic_s = time.monotonic()
                made = events.state.passed_events - client.passed_events
                if made:
                    traffic.count_tokens(call.model, made)
                    client.passed_events += made
                    call.streamed_events = client.passed_events
                if data:
                    call.last_event_s = now - call.arrived_monotonic_s
                    if call.first_event_s is None:
                        call.first_event_s = call.last_event_s
                    client.write(data, now)
                return events.over()

            exchange.on_flow = reply.pause
            await reply.pump(take)
            call.usage = events.state.usage or {}
            if events.state.error is not None:
                _see_death(running, events.state.error)
                call.has_failed = True
                await client.end_with(_event(events.state.error))
            elif not events.state.done:
                raise EngineBroke("its stream ended without its last event")
            else:
                client.finish()
        except EventTooLong as error:
            raise EngineBroke("it sends no event boundary") from error
        finally:
            exchange.on_flow = None
            reply.close()  # an engine notices the closed connection and frees the slot

    async def _send(self, call: Call, running: _Running, body: bytes) -> EngineReply:
        row = running.reservation.row
        assert row.endpoint is not None
        headers = {"X-Request-Id": call.request_id}
        for name in _PASSED_ON:
            if name in call.exchange.headers:
                headers[name] = call.exchange.headers[name]
        keeps = DIALECTS[row.engine].deviations.keeps_connections
        posting = self._engines.post(row.endpoint, call.engine_path, body, headers, keeps=keeps, note=running.note)
        reply = await posting
        if reply.status in _NOT_THIS_ENGINE:
            reply.close()
            raise NotTaken(f"it answers {reply.status}")
        return reply

    def _refuse(self, call: Call, running: _Running, status: int, body: bytes) -> None:
        headers = _json_headers(call)
        envelope = wire.engine_error_envelope(status, body, call.fields)
        _see_death(running, envelope)
        call.has_failed = status >= 500
        if call.has_failed:
            headers["x-should-retry"] = "false"  # the same prompt meets the same fault
        call.exchange.answer(status, headers, orjson.dumps(envelope))

    # -- the clock ----------------------------------------------------------------------------------------------

    def _tick_soon(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        now = time.monotonic()
        for client in list(self._streams):
            client.tick(now)
        for call in list(self._calls):
            if now - call.arrived_monotonic_s >= call.deadlines.total_s and not call.is_late and call.task is not None:
                call.is_late = True
                call.task.cancel()
        for running in list(self._running):
            if self._is_stuck(running, now):
                running.is_stuck = True
                if running.reply is not None:
                    running.reply.break_off(Stuck())
        if self._calls or self._streams:
            self._tick_soon()

    def _is_stuck(self, running: _Running, now: float) -> bool:
        """A stream is judged by its own events, a whole answer, which shows none, by whether its engine makes any
        token at all."""
        if running.is_stuck or now - running.progress_monotonic_s < self._stuck_request_s:
            return False
        if running.call.exchange.is_clogged:
            return False  # the client does not read
        return running.call.stream or self._watch.still_s(running.reservation.row) >= self._stuck_request_s

    def _suspects(self) -> set[str]:
        begin = time.monotonic() - self._stuck_request_s / 8
        return {
            each.reservation.id for each in self._running if not each.call.stream and each.progress_monotonic_s < begin
        }


class ClientStream:
    """The client's side of a stream: committed late, kept alive, ended in one of two forms."""

    def __init__(self, call: Call, heartbeat_style: str) -> None:
        self._call = call
        self._style = heartbeat_style
        self._last_write = time.monotonic()
        self._is_over = False
        self.admitted_monotonic_s: float | None = None
        self.passed_events = 0
        self.committed = False

    def commit(self) -> None:
        """Sends status and headers; from here on errors are events."""
        if not self.committed:
            self.committed = True
            self._call.exchange.begin(200, {**wire.STREAM_HEADERS, "x-request-id": self._call.request_id})

    def write(self, data: bytes, now: float) -> None:
        self._last_write = now
        self._call.exchange.write(data)

    def finish(self) -> None:
        self._is_over = True
        self._call.exchange.end()

    async def end_with(self, event: bytes) -> None:
        """Aborts where no event can be sent: the client must see a broken body and not a short, complete one."""
        self._is_over = True
        self.commit()
        exchange = self._call.exchange
        if exchange.is_clogged:
            exchange.abort()
            return
        exchange.write(event)
        exchange.end()
        try:
            async with asyncio.timeout(_LAST_WRITE_S):
                await exchange.drained()
        except TimeoutError:
            exchange.abort()

    def tick(self, now: float) -> None:
        """Commits once the engine had its chance to refuse, or before a client in the queue loses patience."""
        if self._is_over:
            return
        call = self._call
        if not self.committed:
            admitted = self.admitted_monotonic_s
            is_due = admitted is not None and now - admitted >= _COMMIT_AFTER_S
            if not is_due and now - call.arrived_monotonic_s < call.deadlines.status_s:
                return
            self.commit()
        if self._style == "off" or now - self._last_write < call.deadlines.heartbeat_s or call.exchange.is_clogged:
            return
        self.write(self._beat(), now)

    def _beat(self) -> bytes:
        call = self._call
        if self._style == "comment" or call.shape == "responses":
            return wire.COMMENT_HEARTBEAT
        chat = call.shape == "chat"
        return wire.empty_delta(f"chatcmpl-{call.request_id}", int(time.time()), call.model, chat=chat)


async def _gathered(reply: EngineReply, running: _Running, gathered: Gathered) -> tuple[int, bytes]:
    """Status and body, as the engine would have sent them for a whole answer. Raises EngineBroke."""

    def take(chunk: bytes) -> bool:
        running.progress_monotonic_s = time.monotonic()
        return gathered.feed(chunk)

    try:
        await reply.pump(take)
    except (EventTooLong, orjson.JSONDecodeError) as error:
        raise EngineBroke("it sends no events") from error
    if gathered.error is not None:
        return 500, orjson.dumps(gathered.error)
    if not gathered.done:
        raise EngineBroke("its stream ended without its last event")
    return 200, gathered.answer()


def _see_death(running: _Running, envelope: dict[str, Any]) -> None:
    """Raises EngineBroke where the error is that of a server whose engine is dead: it answers for some time yet."""
    words = DIALECTS[running.reservation.row.engine].deviations.death_words
    if words is not None and words in envelope["error"]["message"]:
        raise EngineBroke("its server answers that the engine is dead")


def _event(value: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + orjson.dumps(value) + wire.EVENT_END


def _json_headers(call: Call) -> dict[str, str]:
    return {"Content-Type": wire.JSON_TYPE, "x-request-id": call.request_id}
