"""One engine stream, event by event: what is passed on, what is hidden, how it ended. No sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from llamarack.engine.dialect import Deviations
from llamarack.gateway import wire

MAX_EVENT_BYTES = 16 * 1024**2
_USAGE_KEY = b'"usage"'
_NO_USAGE = b'"usage":null'
_NOTHING = b"data: null"  # llama.cpp begins a stream of several prompts so, and no client reads it
_PLAIN_BEGIN = b"data: {"
_SOME_REASON = b'"finish_reason":"'


class EventTooLong(Exception):
    """An engine that sends no event boundary within 16 MiB is broken."""


@dataclass(slots=True)
class StreamState:
    """`passed_events`: engine events that went on to the client; with the first, a retry is over."""

    passed_events: int = 0
    done: bool = False
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None


def uncommented(event: bytes) -> bytes:
    """Without the engine's keep-alives; the gateway sends its own."""
    while event.startswith(b":"):
        event = event.partition(b"\n")[2]
    return event


def error_in(event: bytes, prefixes: tuple[bytes, ...]) -> dict[str, Any] | None:
    """The envelope of an event that carries an error inside a 200."""
    if not event.startswith(prefixes):
        return None
    return wire.engine_error_envelope(500, event[event.index(b"{") :] if b"{" in event else b"")


class StreamFilter:
    """Feeds on chunks as they come; whole events come out, joined into one write."""

    def __init__(self, deviations: Deviations, *, hide_usage: bool) -> None:
        self.state = StreamState()
        self._error_prefixes = deviations.error_prefixes
        self._hide_usage = hide_usage
        self._own_usage: dict[str, Any] | None = None  # from chunks of their own; else:
        self._beside_usage: dict[str, Any] | None = None  # from beside finish reasons
        self._usage_event: bytes | None = None  # what is still to be sent before [DONE]
        self._rest = b""

    def over(self) -> bool:
        return self.state.done or self.state.error is not None

    def feed(self, chunk: bytes) -> bytes:
        """What to write now; empty when nothing is whole, after the end, or all of it is hidden."""
        if self.over():
            return b""  # OpenAI clients break on anything after [DONE]
        if (  # one whole event with nothing in it but tokens: nearly all are
            not self._rest
            and chunk.startswith(_PLAIN_BEGIN)
            and chunk.find(wire.EVENT_END) == len(chunk) - len(wire.EVENT_END)
            and _USAGE_KEY not in chunk
            and _SOME_REASON not in chunk
            and not chunk.startswith(self._error_prefixes)
        ):
            self.state.passed_events += 1
            return chunk
        *events, self._rest = (self._rest + chunk).split(wire.EVENT_END)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong
        out: list[bytes] = []
        for event in events:
            out += self._take(event)
            if self.over():
                break
        return wire.EVENT_END.join([*out, b""]) if out else b""

    def _take(self, event: bytes) -> list[bytes]:
        """Notes what the event means; what goes on in its place."""
        event = uncommented(event)
        if not event or event == _NOTHING:
            return []
        if event.startswith(wire.DONE):
            self.state.done = True
            return [event] if self._usage_event is None or self._hide_usage else [self._usage_event, event]
        self.state.error = error_in(event, self._error_prefixes)
        if self.state.error is not None:
            return []
        if _SOME_REASON in event:
            event = wire.with_closed_reasons(event)
        if _USAGE_KEY in event and _NO_USAGE not in event:
            return self._take_usage(event)
        self.state.passed_events += 1
        return [event]

    def _take_usage(self, event: bytes) -> list[bytes]:
        """Holds usage back for one chunk before [DONE]: clients take nothing after it, and drop choices beside it.

        llama.cpp sends it once a choice, and in /v1/completions beside the finish reason, asked or not.
        """
        chunk = _chunk_of(event)
        usage, choices = chunk.get("usage"), chunk.get("choices")
        if isinstance(usage, dict) and not choices:
            is_first = self._own_usage is None
            self.state.usage = self._own_usage = summed_usage(self._own_usage, usage)
            self._usage_event = event if is_first else _usage_event(chunk, self._own_usage)
            return []
        if isinstance(usage, dict) and choices and any(choice.get("finish_reason") for choice in choices):
            if self._own_usage is None:
                self.state.usage = self._beside_usage = summed_usage(self._beside_usage, usage)
                self._usage_event = _usage_event(chunk, self._beside_usage)
            del chunk["usage"]
            event = b"data: " + orjson.dumps(chunk)
        self.state.passed_events += 1
        return [event]


class ResponsesFilter:
    """The stream of /v1/responses: typed events, all passed on as they are; over with the one that closes it."""

    _LAST = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed", b"event: error")

    def __init__(self) -> None:
        self.state = StreamState()
        self._rest = b""

    def over(self) -> bool:
        return self.state.done

    def feed(self, chunk: bytes) -> bytes:
        if self.state.done:
            return b""
        *events, self._rest = (self._rest + chunk).split(wire.EVENT_END)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong
        out: list[bytes] = []
        for event in events:
            if event.startswith(b":") or not event:
                continue
            out.append(event)
            self.state.passed_events += 1
            if event.startswith(self._LAST):
                self.state.done = True
                self.state.usage = _responses_usage(event)
                break
        return wire.EVENT_END.join([*out, b""]) if out else b""


def _responses_usage(event: bytes) -> dict[str, Any]:
    """In the words of the other endpoints."""
    response = _chunk_of(event).get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    return responses_usage(usage)


def responses_usage(usage: Any) -> dict[str, Any]:
    if not isinstance(usage, dict):
        return {}
    return {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")}


def _usage_event(chunk: dict[str, Any], usage: dict[str, Any]) -> bytes:
    kept = {name: chunk[name] for name in chunk if name != "timings"}
    return b"data: " + orjson.dumps({**kept, "choices": [], "usage": usage})


def _chunk_of(event: bytes) -> dict[str, Any]:
    """Empty for what is not a JSON object."""
    try:
        value = orjson.loads(event[event.index(b"{") :])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def summed_usage(before: dict[str, Any] | None, usage: dict[str, Any]) -> dict[str, Any]:
    """Of several choices, each of which tells its own output and all of which the same prompt."""
    if before is None:
        return usage
    made = usage.get("completion_tokens", 0)
    names = ("completion_tokens", "total_tokens")
    return {**usage, **{name: before[name] + made for name in names if name in before}}
