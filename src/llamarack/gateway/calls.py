"""One request on its way to an engine and back, as the parts of the gateway that carry it see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarack.gateway.admission import Reservation
from llamarack.gateway.deadlines import Deadlines
from llamarack.gateway.demand import Demand
from llamarack.gateway.exchange import Exchange
from llamarack.gateway.upstream import EngineReply


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
    per_token_s: float | None = None
    streamed_events: int = 0
    prompt_tokens: int | None = None  # as the engine counted
    generated_tokens: int | None = None
    is_accounted: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    asked_bytes: int = 0  # of the client's own body
    fields: Sequence[str] = ()  # names in the client's body that an engine's refusal may be about
    task: asyncio.Task[Any] | None = None
    end_without_task: Callable[[Exception], None] | None = None  # while `direct` has it
    is_late: bool = False
    has_failed: bool = False  # the engine answered with a 5xx, or with an error in its stream


@dataclass(slots=True, eq=False)
class Running:
    """A request at an engine. `progress_monotonic_s`: when it last showed any."""

    call: Call
    reservation: Reservation
    progress_monotonic_s: float
    reply: EngineReply | None = None
    is_stuck: bool = False

    def note(self, reply: EngineReply) -> None:
        """The connection that it is on, from the moment it is sent."""
        self.reply = reply
