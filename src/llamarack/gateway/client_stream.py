"""The client's side of a stream: committed late, kept alive, ended in one of two forms."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from llamarack.gateway import wire

if TYPE_CHECKING:
    from llamarack.gateway.calls import Call

# Time for the engine to refuse a bad request with its own status before the 200 of a stream is committed.
_COMMIT_AFTER_S = 1.0
# A client that reads nothing would hold the last event, and with it the request, for ever.
_LAST_WRITE_S = 5.0


class ClientStream:
    """The client's side of a stream: committed late, kept alive, ended in one of two forms."""

    def __init__(self, call: Call, heartbeat_style: str) -> None:
        self._style = heartbeat_style
        self.last_write_monotonic_s = time.monotonic()
        self._is_over = False
        self.admitted_monotonic_s: float | None = None
        self.passed_events = 0
        self.call = call
        self.committed = False

    def commit(self) -> None:
        """Sends status and headers; from here on errors are events."""
        if not self.committed:
            self.committed = True
            self.call.exchange.begin(200, {**wire.STREAM_HEADERS, "x-request-id": self.call.request_id})

    def write(self, data: bytes, now: float) -> None:
        self.last_write_monotonic_s = now
        self.call.exchange.write(data)

    def finish(self) -> None:
        self._is_over = True
        self.call.exchange.end()

    async def end_with(self, event: bytes) -> None:
        """Aborts where no event can be sent: the client must see a broken body and not a short, complete one."""
        self._is_over = True
        self.commit()
        exchange = self.call.exchange
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
        call = self.call
        if not self.committed:
            admitted = self.admitted_monotonic_s
            is_due = admitted is not None and now - admitted >= _COMMIT_AFTER_S
            if not is_due and now - call.arrived_monotonic_s < call.deadlines.status_s:
                return
            self.commit()
        if (
            self._style == "off"
            or now - self.last_write_monotonic_s < call.deadlines.heartbeat_s
            or call.exchange.is_clogged
        ):
            return
        self.write(self._beat(), now)

    def _beat(self) -> bytes:
        call = self.call
        if self._style == "comment" or call.shape == "responses":
            return wire.COMMENT_HEARTBEAT
        chat = call.shape == "chat"
        return wire.empty_delta(f"chatcmpl-{call.request_id}", int(time.time()), call.model, chat=chat)
