"""What happened to one request: raw stamps and counts, nothing derived. `metrics` derives.

All stamps are CLOCK_MONOTONIC nanoseconds of the client's machine, so records of several worker processes share one
clock. `None` is "did not happen" or "the server did not say".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

SCHEMA_VERSION = 1


class ErrorKind(StrEnum):
    """Why a request counts as failed. HTTP 200 is no protection against any but the first two."""

    CONNECT = "connect"
    HTTP_STATUS = "http_status"
    IN_BAND = "in_band"  # an error event after HTTP 200
    TRUNCATED = "truncated"  # the connection or an event ended in the middle
    NO_DONE = "no_done"  # the response ended well but without [DONE]
    NO_FINISH_REASON = "no_finish_reason"  # [DONE] came, but no choice said why it ended
    MALFORMED = "malformed"  # not JSON, not SSE, not HTTP
    EMPTY = "empty"  # a complete answer of no tokens
    TIMEOUT = "timeout"


class Phase(StrEnum):
    """Where in a point the request was sent. Only `measured` counts; the others keep the load level."""

    WARM_UP = "warm_up"
    MEASURED = "measured"
    COOL_DOWN = "cool_down"


class ChunkKind(StrEnum):
    ANSWER = "answer"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    SILENT = "silent"  # the server counted a token that has no text, such as the end-of-sequence token


class Chunk(NamedTuple):
    """One event that carried tokens. `tokens`: how many, None when the server gives no running count."""

    at_monotonic_ns: int
    tokens: int | None
    kind: ChunkKind = ChunkKind.ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """`scheduled`: when the load model wanted it sent; `sent`: just before its bytes were given to a ready
    connection; `first_byte`: of the HTTP response; `first_event`: first event with a choice, role-only ones too;
    `finished`: end of the response, or when the failure was noticed. `num_events`: all events, [DONE] included.
    `num_prompt_tokens`, `num_output_tokens`, `num_cached_tokens` are the server's usage.
    """

    index: int
    point: int
    repeat: int
    worker: int
    phase: Phase
    prompt_id: str
    scheduled_monotonic_ns: int
    sent_monotonic_ns: int | None
    first_byte_monotonic_ns: int | None = None
    first_event_monotonic_ns: int | None = None
    finished_monotonic_ns: int
    chunks: tuple[Chunk, ...] = ()
    num_events: int = 0
    finish_reason: str | None = None
    http_status: int | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    requested_output_tokens: int | None = None
    error_kind: ErrorKind | None = None
    error_detail: str | None = None
    is_cancelled: bool = False
    text: str | None = None

    @property
    def is_failure(self) -> bool:
        return self.error_kind is not None


def to_json_line(record: RequestRecord) -> bytes:
    """One line, newline included. Chunks are `[at_ns, tokens, kind]`."""
    return orjson.dumps(record, default=tuple, option=orjson.OPT_APPEND_NEWLINE)


def from_json_line(line: bytes) -> RequestRecord:
    """Raises ValueError for a line that is cut off, as the last line of a killed run may be."""
    values: dict[str, Any] = orjson.loads(line)
    values["chunks"] = tuple(Chunk(at, tokens, ChunkKind(kind)) for at, tokens, kind in values["chunks"])
    values["phase"] = Phase(values["phase"])
    values["error_kind"] = None if values["error_kind"] is None else ErrorKind(values["error_kind"])
    return RequestRecord(**values)
