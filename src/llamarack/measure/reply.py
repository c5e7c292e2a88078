"""What do the events of one streamed answer say? Events in, chunks and a verdict out; no I/O and no clock.

A running count of output tokens is taken from `usage` in every event (vLLM, `continuous_usage_stats`) or from
`timings.predicted_n` (llama.cpp, `timings_per_token`); the total only from `usage`. Neither is ever guessed.
"""

from __future__ import annotations

from typing import Any

import orjson

from llamarack.measure.record import Chunk, ChunkKind, ErrorKind
from llamarack.measure.sse import SseDecoder, SseEvent

_MAX_DETAIL = 500
_KINDS = (
    ("content", ChunkKind.ANSWER),
    ("text", ChunkKind.ANSWER),
    ("refusal", ChunkKind.ANSWER),
    ("reasoning_content", ChunkKind.REASONING),
    ("reasoning", ChunkKind.REASONING),
    ("tool_calls", ChunkKind.TOOL_CALL),
)


class Reply:
    """One per request: `feed` every body read, then `end` once. The first error found stays."""

    def __init__(self, *, keep_text: bool = False) -> None:
        self._decoder = SseDecoder()
        self._counted_tokens = 0
        self._is_counted: bool | None = None  # decided by the first event with tokens
        self._texts: list[str] | None = [] if keep_text else None
        self.chunks: list[Chunk] = []
        self.num_events = 0
        self.first_event_monotonic_ns: int | None = None
        self.done_monotonic_ns: int | None = None
        self.finish_reason: str | None = None
        self.num_prompt_tokens: int | None = None
        self.num_output_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        self.error_kind: ErrorKind | None = None
        self.error_detail: str | None = None

    @property
    def text(self) -> str | None:
        return None if self._texts is None else "".join(self._texts)

    def feed(self, data: bytes, read_monotonic_ns: int) -> None:
        for event in self._decoder.feed(data, read_monotonic_ns):
            self.num_events += 1
            if event.data == b"[DONE]":
                self.done_monotonic_ns = event.read_monotonic_ns
            else:
                self._event(event)

    def end(self, *, is_whole: bool) -> None:
        """`is_whole`: the HTTP body ended where its framing said it would."""
        if not is_whole or self._decoder.has_unfinished_event:
            self.fail(ErrorKind.TRUNCATED, "the stream was cut off")
        elif self.num_events == 0:
            self.fail(ErrorKind.MALFORMED, "HTTP 200 without a single event")
        elif self.done_monotonic_ns is None:
            self.fail(ErrorKind.NO_DONE, "the stream ended without [DONE]")
        elif self.finish_reason is None:
            self.fail(ErrorKind.NO_FINISH_REASON, "[DONE] came without a finish_reason")
        elif not self.chunks:
            self.fail(ErrorKind.EMPTY, "a complete answer without tokens")

    def fail(self, kind: ErrorKind, detail: str) -> None:
        if self.error_kind is None:
            self.error_kind, self.error_detail = kind, detail[:_MAX_DETAIL]

    def _event(self, event: SseEvent) -> None:
        try:
            body = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict):
            self.fail(ErrorKind.MALFORMED, f"event is no JSON object: {event.data[:200].decode('utf-8', 'replace')}")
            return
        if event.name == "error" or body.get("error") is not None:
            self.fail(ErrorKind.IN_BAND, event.data.decode("utf-8", "replace"))
            return
        usage = body.get("usage")
        if isinstance(usage, dict):
            self._usage(usage)
        choices = body.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0], _running_count(body), event.read_monotonic_ns)

    def _usage(self, usage: dict[str, Any]) -> None:
        self.num_prompt_tokens = _count(usage.get("prompt_tokens"), self.num_prompt_tokens)
        self.num_output_tokens = _count(usage.get("completion_tokens"), self.num_output_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.num_cached_tokens = _count(details.get("cached_tokens"), self.num_cached_tokens)

    def _choice(self, choice: dict[str, Any], counted: int | None, at_ns: int) -> None:
        if self.first_event_monotonic_ns is None:
            self.first_event_monotonic_ns = at_ns
        if isinstance(choice.get("finish_reason"), str):
            self.finish_reason = choice["finish_reason"]
        delta = choice.get("delta")
        carrier = delta if isinstance(delta, dict) else choice
        kind = next((kind for key, kind in _KINDS if carrier.get(key)), None)
        if kind is None and (not self._is_counted or counted is None or counted <= self._counted_tokens):
            return  # a role, a finish reason, nothing
        if self._is_counted is None:
            self._is_counted = counted is not None
        tokens = None
        if self._is_counted and counted is not None:
            tokens, self._counted_tokens = max(0, counted - self._counted_tokens), max(counted, self._counted_tokens)
        self.chunks.append(Chunk(at_ns, tokens, kind or ChunkKind.SILENT))
        if self._texts is not None and kind is ChunkKind.ANSWER:
            self._texts.append(carrier.get("content") or carrier.get("text") or "")


def _running_count(body: dict[str, Any]) -> int | None:
    usage, timings = body.get("usage"), body.get("timings")
    if isinstance(usage, dict):
        return _count(usage.get("completion_tokens"), None)
    return _count(timings.get("predicted_n"), None) if isinstance(timings, dict) else None


def _count(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
