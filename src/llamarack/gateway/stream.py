"""One engine stream, event by event: what is passed on, what is hidden, how it ended. No sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from llamarack.engine.adaptor import Deviations
from llamarack.gateway import wire

_MAX_EVENT_BYTES = 16 * 1024**2
_USAGE_KEY = b'"usage"'
_NO_USAGE = b'"usage":null'


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
        self._late_usage: dict[str, Any] | None = None  # the chunk that is still to be sent before [DONE]
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
            out += self._take(event)
            if self.over():
                break
        return wire.EVENT_END.join([*out, b""]) if out else b""

    def _take(self, event: bytes) -> list[bytes]:
        """Notes what the event means; what goes on in its place."""
        while event.startswith(b":"):  # the engine's keep-alives; the gateway sends its own
            event = event.partition(b"\n")[2]
        if not event:
            return []
        if event.startswith(wire.DONE):
            self.state.done = True
            return [*self._usage_event(), event]
        if event.startswith(self._error_prefixes):
            self.state.error = wire.engine_error_envelope(500, event[event.index(b"{") :] if b"{" in event else b"")
            return []
        if _USAGE_KEY in event and _NO_USAGE not in event:
            return self._take_usage(event)
        self.state.passed_events += 1
        return [event]

    def _take_usage(self, event: bytes) -> list[bytes]:
        chunk = _chunk_of(event)
        usage = chunk.get("usage")
        if not isinstance(usage, dict):
            self.state.passed_events += 1
            return [event]
        choices = chunk.get("choices")
        if not choices:
            self.state.usage, self._late_usage = usage, None
            if self._hide_usage:
                return []
        elif any(choice.get("finish_reason") for choice in choices):
            # llama.cpp's /v1/completions says it with the finish reason, asked or not. Clients drop the choices of a
            # chunk that has usage, so it gets a chunk of its own.
            self.state.usage = _sum(self.state.usage, usage)
            self._late_usage = {name: chunk[name] for name in chunk if name != "timings"} | {"choices": []}
            del chunk["usage"]
            event = b"data: " + orjson.dumps(chunk)
        self.state.passed_events += 1
        return [event]

    def _usage_event(self) -> list[bytes]:
        if self._late_usage is None or self._hide_usage:
            return []
        return [b"data: " + orjson.dumps({**self._late_usage, "usage": self.state.usage})]


def _chunk_of(event: bytes) -> dict[str, Any]:
    """Empty for what is not a JSON object."""
    try:
        value = orjson.loads(event[event.index(b"{") :])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _sum(before: dict[str, Any] | None, usage: dict[str, Any]) -> dict[str, Any]:
    """Of several choices, each of which tells its own output."""
    if before is None:
        return usage
    names = ("completion_tokens", "total_tokens")
    return {**usage, **{name: before[name] + usage[name] for name in names if name in before and name in usage}}
