"""How long a client will wait, as its own headers say. Pure.

The OpenAI SDKs tell their timeouts: `X-Stainless-Timeout` is for the whole call, `X-Stainless-Read-Timeout` for the
silence between two bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llamarack.config import Gateway

# A request in the queue has no status yet: a 503 is what every client knows to retry, an event inside a 200 is not.
# Past this, with a longer `max_queue_s`, headers and keep-alives go out: LangChain4j gives up after 60 s without any.
_QUEUE_PATIENCE_S = 45.0
_LEAST_S = 0.05


@dataclass(slots=True, kw_only=True)
class Deadlines:
    """Seconds from the arrival, but for the heartbeat. `queue_s`: longest wait for a slot. `total_s`: to the end.
    `status_s`: until a stream's headers must be out. `heartbeat_s`: silence before one is sent."""

    queue_s: float
    total_s: float
    status_s: float
    heartbeat_s: float


def deadlines(headers: Mapping[str, str], settings: Gateway, *, stream: bool, usual_s: float) -> Deadlines:
    """`usual_s`: how long the engine takes, to the answer or to a stream's first event; 0 where not known.

    Work that cannot be done within the client's own time is not begun: its answer would meet nobody, and the SDK sends
    the request again.
    """
    total_s = _seconds(headers.get("x-stainless-timeout"))
    silence_s = _seconds(headers.get("x-stainless-read-timeout"))
    if total_s is None and silence_s is None:
        limit_s = settings.request_timeout_s
        return Deadlines(
            queue_s=min(settings.max_queue_s, max(_LEAST_S, limit_s - usual_s)),
            total_s=limit_s,
            status_s=_QUEUE_PATIENCE_S,
            heartbeat_s=settings.heartbeat.interval_s,
        )
    limit_s = min(total_s or math.inf, settings.request_timeout_s)
    answer_s = limit_s if stream else min(limit_s, silence_s or math.inf)
    queue_s = min(settings.max_queue_s, max(_LEAST_S, answer_s - usual_s))
    return Deadlines(
        queue_s=queue_s,
        total_s=limit_s,
        status_s=min(_QUEUE_PATIENCE_S, (silence_s or math.inf) / 2),
        heartbeat_s=min(settings.heartbeat.interval_s, (silence_s or math.inf) / 2),
    )


def _seconds(text: str | None) -> float | None:
    """None for what is no time: the SDKs also send words."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
