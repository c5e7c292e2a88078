"""An engine's stream on its way: its chunks as the client gets them, and what is noted of them."""

from __future__ import annotations

import time

from llamarack.engine.dialects import DIALECTS
from llamarack.gateway.calls import Running
from llamarack.gateway.client_stream import ClientStream
from llamarack.gateway.stream import ResponsesFilter, StreamFilter

_FIRST_EVENTS = 2  # before the first token there is one that tells the role


class Passage:
    __slots__ = ("_call", "_client", "_exchange", "_gives_way", "_running", "_write", "events")

    def __init__(self, running: Running, client: ClientStream) -> None:
        call = running.call
        self.events: StreamFilter | ResponsesFilter
        if call.shape == "responses":
            self.events = ResponsesFilter()
        else:
            deviations = DIALECTS[running.reservation.row.engine].deviations
            self.events = StreamFilter(deviations, hide_usage=call.hide_usage)
        self._call = call
        self._running = running
        self._client = client
        self._exchange = call.exchange
        self._write = call.exchange.write
        self._gives_way = False

    def take(self, chunk: bytes) -> bool:
        """Straight from the engine's socket to the client's. True once the stream is over."""
        events, call, client = self.events, self._call, self._client
        data = events.feed(chunk)
        now = self._running.progress_monotonic_s = time.monotonic()
        client.passed_events = events.state.passed_events
        over = events.over()
        if over:
            self._exchange.hold()  # its end goes with it
        if data:
            call.last_event_s = now - call.arrived_monotonic_s
            if call.first_event_s is None:
                call.first_event_s = call.last_event_s
            elif not self._gives_way and events.state.passed_events > _FIRST_EVENTS and self._running.reply is not None:
                self._gives_way = True
                self._running.reply.give_way()
            client.last_write_monotonic_s = now
            self._write(data)
        return over
