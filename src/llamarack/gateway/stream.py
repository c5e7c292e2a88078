"""One engine stream, event by event: what is passed on, what is hidden, how it ended. No sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from llamarack.engine.adaptor import Deviations
from llamarack.gateway import wire

_MAX_EVENT_BYTES = 16 * 1024**2
_USAGE_KEY = b'"usage"'
_NO_CHOICES = b'"choices":[]'


class EventTooLong(Exception):
    """An engine that sends no event boundary within 16 MiB is broken."""


@dataclass(slots=True)
class StreamState:
    """`passed_events`: engine events that went on to the client; with the first, a retry is over."""

    passed_events: int = 0
    done: bool = False
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None


class StreamFilter:
    """Feeds on chunks as they come; whole events come out, joined into one write."""

    def __init__(self, deviations: Deviations, *, hide_usage: bool) -> None:
        self.state = StreamState()
        self._error_prefixes = deviations.error_prefixes
        self._hide_usage = hide_usage
        self._rest = b""

    def over(self) -> bool:
        return self.state.done or self.state.error is not None

    def feed(self, chunk: bytes) -> bytes:
        """What to write now; empty when nothing is whole, after the end, or all of it is hidden."""
        if self.over():
            return b""  # OpenAI clients break on anything after [DONE]
        *events, self._rest = (self._rest + chunk).split(wire.EVENT_END)
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise EventTooLong
        out: list[bytes] = []
        for event in events:
            if self._take(event):
                out.append(event)
            if self.over():
                break
        return wire.EVENT_END.join([*out, b""]) if out else b""

    def _take(self, event: bytes) -> bool:
        """Notes what the event means; False hides it."""
        if event.startswith(wire.DONE):
            self.state.done = True
            return True
        if not event or event.startswith(b":"):
            return False  # the engine's keep-alives; the gateway sends its own
        if event.startswith(self._error_prefixes):
            self.state.error = wire.engine_error_envelope(500, event[event.index(b"{") :] if b"{" in event else b"")
            return False
        if _USAGE_KEY in event and _NO_CHOICES in event:
            self._note_usage(event)
            if self._hide_usage:
                return False
        self.state.passed_events += 1
        return True

    def _note_usage(self, event: bytes) -> None:
        try:
            usage = orjson.loads(event[event.index(b"{") :]).get("usage")
        except (orjson.JSONDecodeError, ValueError, AttributeError):
            return
        if isinstance(usage, dict):
            self.state.usage = usage
