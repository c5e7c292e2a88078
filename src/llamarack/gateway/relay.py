"""One user request to an engine and back: admitted, sent, retried while nothing has been passed on, cancelled with
its client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from llamarack.config import Gateway
from llamarack.engine.dialects import DIALECTS
from llamarack.errors import DeadlineExceeded, Overloaded, RequestError, UpstreamFailed
from llamarack.gateway import wire
from llamarack.gateway.admission import Admission, Reservation
from llamarack.gateway.calls import Call, Running, Stuck
from llamarack.gateway.client_stream import ClientStream
from llamarack.gateway.direct import Begun
from llamarack.gateway.engine_watch import EngineWatch
from llamarack.gateway.gathered import Gathered
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.outcomes import Outcomes
from llamarack.gateway.passage import Passage
from llamarack.gateway.stream import EventTooLong, responses_usage
from llamarack.gateway.upstream import EngineBroke, EngineReply, Engines, NotTaken

# So many engines may break over one request before it is held to be the cause.
_MAX_ATTEMPTS = 4
# A replica that broke off but still counts as ready gets the request again after this; the supervisor has had time
# to notice a death.
_FORGIVE_AFTER_S = 2.0
# Loading, or another life of the engine, whose key is not the one that the table told: the client is at no fault.
_NOT_THIS_ENGINE = frozenset({401, 503})
_TICK_S = 0.25
_PASSED_ON = ("traceparent", "tracestate", "baggage")

log = logging.getLogger(__name__)

Attempt = Callable[[Call, Running, "ClientStream | None", "Begun | None"], Awaitable[None]]


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
        self.admission = admission
        self.metrics = metrics
        self.engines = Engines()
        self._watch = watch
        self._stuck_request_s = stuck_request_s
        self._calls: set[Call] = set()
        self._running: set[Running] = set()
        self._streams: set[ClientStream] = set()
        self._ticking: asyncio.TimerHandle | None = None
        watch.suspects = self._suspects

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self.engines.close()

    async def serve(self, call: Call, begun: Begun | None = None) -> None:
        """Answers it. `begun`: how far it is already. Raises RequestError only while nothing was sent to the client."""
        if not call.stream:
            await self._in_time(call, None, self._whole_attempt, begun)
            return
        client = begun.client if begun is not None and begun.client is not None else self.enter_stream(call)
        try:
            await self._in_time(call, client, self._stream_attempt, begun)
        except RequestError as failure:
            if not client.committed:
                raise
            await client.end_with(wire.error_event(failure))
        finally:
            self.leave_stream(client)

    # -- what is running ----------------------------------------------------------------------------------------

    def enter(self, call: Call, reservation: Reservation, now: float) -> Running:
        """At an engine from now on, until `leave`."""
        call.replica = reservation.row.id
        call.sent_monotonic_s = now
        running = Running(call, reservation, now)
        self._running.add(running)
        self._calls.add(call)
        if self._ticking is None:
            self._tick_soon()
        return running

    def leave(self, running: Running) -> None:
        self._running.discard(running)
        if running.is_stuck:
            self._watch.hold(running.reservation)
        else:
            self.admission.give(running.reservation)

    def forget(self, call: Call) -> None:
        """Its time is minded no more."""
        self._calls.discard(call)

    def enter_stream(self, call: Call) -> ClientStream:
        client = ClientStream(call, self.settings.heartbeat.style)
        self._streams.add(client)
        if self._ticking is None:
            self._tick_soon()
        return client

    def leave_stream(self, client: ClientStream) -> None:
        self._count_events(client)
        self._streams.discard(client)

    def _count_events(self, client: ClientStream) -> None:
        """For the dashboard, whose slots are seconds long."""
        call = client.call
        self.metrics.traffic.count_tokens(call.model, client.passed_events - call.streamed_events)
        call.streamed_events = client.passed_events

    def count(self, running: Running) -> None:
        """One that its engine answered."""
        call = running.call
        first_s = call.first_event_s
        if first_s is not None and call.sent_monotonic_s is not None:
            first_s -= call.sent_monotonic_s - call.arrived_monotonic_s
        self.outcomes.count(running.reservation.row.id, failed=call.has_failed, first_token_s=first_s)

    # -- the way of a task --------------------------------------------------------------------------------------

    async def _in_time(self, call: Call, client: ClientStream | None, attempt: Attempt, begun: Begun | None) -> None:
        """What `asyncio.timeout` does, but by the one clock: a timer of its own would cost each request as much as its
        admission. Raises DeadlineExceeded."""
        task = call.task = asyncio.current_task()
        self._calls.add(call)
        self._tick_soon()
        try:
            await self._with_retries(call, client, attempt, begun)
        except asyncio.CancelledError:
            if not call.is_late or task is None or task.uncancel() > 0:
                raise  # the client left
            raise _late(call) from None
        finally:
            self._calls.discard(call)

    async def _with_retries(
        self, call: Call, client: ClientStream | None, attempt: Attempt, begun: Begun | None
    ) -> None:
        """An engine that never had the request costs time and no attempt: it says nothing about the request."""
        broke: set[str] = set()
        attempts = 0
        not_taken_since_s: float | None = None
        while attempts < _MAX_ATTEMPTS:
            if begun is not None:
                running = begun.running
            else:
                reservation = await self._take(call, broke, again=bool(broke))
                running = self.enter(call, reservation, time.monotonic())
            reservation = running.reservation
            if client is not None and client.admitted_monotonic_s is None:
                client.admitted_monotonic_s = running.progress_monotonic_s
            try:
                await attempt(call, running, client, begun)
                self.count(running)
                return
            except Stuck:
                self.outcomes.count(reservation.id, failed=True)
                # Not elsewhere: what one engine cannot do, the next would be stuck with too.
                self.metrics.stuck.add(1, call.model)
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
                self.metrics.retries.add(1, call.model)
                if not isinstance(error, NotTaken):
                    attempts, not_taken_since_s = attempts + 1, None
                    continue
                not_taken_since_s = not_taken_since_s or time.monotonic()
                if time.monotonic() - not_taken_since_s >= call.deadlines.queue_s:
                    raise UpstreamFailed(
                        f"no engine took it within {call.deadlines.queue_s:g} s: {error}", retry_after_s=2
                    ) from error
            finally:
                begun = None
                self.leave(running)
        raise UpstreamFailed(f"{_MAX_ATTEMPTS} engines broke off before their first token", retry_after_s=2)

    async def _take(self, call: Call, broke: set[str], *, again: bool) -> Reservation:
        admission, started = self.admission, time.monotonic()
        if not again:
            reservation = await admission.take(call.model, call.demand, wait_s=call.deadlines.queue_s)
            call.queue_s = time.monotonic() - started
            self.metrics.queue_wait.observe(call.model, call.queue_s)
            return reservation
        try:
            return await admission.take(call.model, call.demand, excluded=broke, again=True, wait_s=_FORGIVE_AFTER_S)
        except Overloaded:
            return await admission.take(call.model, call.demand, again=True)

    async def _whole_attempt(self, call: Call, running: Running, _: ClientStream | None, begun: Begun | None) -> None:
        deviations = DIALECTS[running.reservation.row.engine].deviations
        asked = call.body if call.stream_body is None or deviations.ends_whole_answers else call.stream_body
        reply = await self._reply(call, running, asked, begun)
        try:
            if asked is call.body or reply.status != 200:
                status, body = reply.status, await reply.read()
            else:
                status, body = await _gathered(reply, running, Gathered(deviations, call.shape))
        finally:
            reply.close()
        if status != 200:
            self._refuse(call, running, status, body)
        else:
            self.answer_whole(call, body)

    def answer_whole(self, call: Call, body: bytes) -> None:
        """Of a 200."""
        try:
            usage = orjson.loads(body).get("usage") or {}
        except (orjson.JSONDecodeError, AttributeError):
            pass
        else:
            call.usage = responses_usage(usage) if call.shape == "responses" else usage
        call.exchange.answer(200, _json_headers(call), wire.with_closed_reasons(body))

    async def _stream_attempt(
        self, call: Call, running: Running, client: ClientStream | None, begun: Begun | None
    ) -> None:
        assert client is not None
        reply = await self._reply(call, running, call.body, begun)
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
            exchange.on_flow = reply.pause
            if begun is not None and begun.passage is not None:
                passage = begun.passage
                if not reply.is_done:
                    await reply.pump(passage.take)
            else:
                passage = Passage(running, client)
                await reply.pump(passage.take)
            state = passage.events.state
            call.usage = state.usage or {}
            if state.error is not None:
                _see_death(running, state.error)
                call.has_failed = True
                await client.end_with(_event(state.error))
            elif not state.done:
                raise EngineBroke("its stream ended without its last event")
            else:
                client.finish()
        except EventTooLong as error:
            raise EngineBroke("it sends no event boundary") from error
        finally:
            exchange.on_flow = None
            exchange.let_go()  # where another engine goes on
            reply.close()  # an engine notices the closed connection and frees the slot

    async def _reply(self, call: Call, running: Running, body: bytes, begun: Begun | None) -> EngineReply:
        """With its head there. Raises EngineBroke, and what it was broken off with."""
        reply = begun.reply if begun is not None else None
        if reply is not None and isinstance(reply.fault, EngineBroke) and reply.said_nothing:
            reply.close()
            reply = None  # it was closed for being idle, most likely; another connection tells
        if reply is None:
            row = running.reservation.row
            assert row.endpoint is not None
            keeps = DIALECTS[row.engine].deviations.keeps_connections
            reply = await self.engines.post(
                row.endpoint, call.engine_path, body, self.headers_of(call), keeps=keeps, note=running.note
            )
        else:
            try:
                await reply.head()
            except BaseException:
                reply.close()
                raise
        if reply.status in _NOT_THIS_ENGINE:
            reply.close()
            raise NotTaken(f"it answers {reply.status}")
        return reply

    def headers_of(self, call: Call) -> dict[str, str]:
        """Of the request to the engine."""
        given = call.exchange.headers
        headers = {"X-Request-Id": call.request_id}
        for name in _PASSED_ON:
            if name in given:
                headers[name] = given[name]
        return headers

    def _refuse(self, call: Call, running: Running, status: int, body: bytes) -> None:
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
            self._count_events(client)
            client.tick(now)
        for call in list(self._calls):
            if now - call.arrived_monotonic_s >= call.deadlines.total_s and not call.is_late:
                if call.end_without_task is not None:
                    call.is_late = True
                    call.end_without_task(_late(call))
                elif call.task is not None:
                    call.is_late = True
                    call.task.cancel()
        for running in list(self._running):
            if self._is_stuck(running, now):
                running.is_stuck = True
                if running.reply is not None:
                    running.reply.break_off(Stuck())
        if self._calls or self._streams:
            self._tick_soon()

    def _is_stuck(self, running: Running, now: float) -> bool:
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


async def _gathered(reply: EngineReply, running: Running, gathered: Gathered) -> tuple[int, bytes]:
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


def _late(call: Call) -> DeadlineExceeded:
    return DeadlineExceeded(f"not finished within {call.deadlines.total_s:g} s", should_retry=False)


def _see_death(running: Running, envelope: dict[str, Any]) -> None:
    """Raises EngineBroke where the error is that of a server whose engine is dead: it answers for some time yet."""
    words = DIALECTS[running.reservation.row.engine].deviations.death_words
    if words is not None and words in envelope["error"]["message"]:
        raise EngineBroke("its server answers that the engine is dead")


def _event(value: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + orjson.dumps(value) + wire.EVENT_END


def _json_headers(call: Call) -> dict[str, str]:
    return {"Content-Type": wire.JSON_TYPE, "x-request-id": call.request_id}
