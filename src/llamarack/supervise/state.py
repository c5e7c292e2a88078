"""The states of a replica, the transitions between them, and the restart policy. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"  # waits for the load lock, then its process is being made
    LOADING = "loading"  # the process lives and does not answer yet
    WARMING = "warming"  # it answers; the warm-up runs
    READY = "ready"
    DRAINING = "draining"  # finishes what runs, gets nothing new
    STOPPING = "stopping"
    BACKOFF = "backoff"  # died; will be started again
    FAILED = "failed"  # died too often; stays down until somebody acts


class Event(StrEnum):
    START = "start"
    SPAWNED = "spawned"
    ANSWERED = "answered"
    WARMED = "warmed"
    ADOPTED = "adopted"  # a ready engine found again by a new supervisor
    DRAIN = "drain"
    STOP = "stop"
    GONE = "gone"  # no process is left
    DIED = "died"
    RETRY = "retry"
    GIVE_UP = "give_up"


_ALIVE = (State.STARTING, State.LOADING, State.WARMING, State.READY)

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STOPPED, Event.START): State.STARTING,
    (State.STOPPED, Event.ADOPTED): State.READY,
    (State.STARTING, Event.SPAWNED): State.LOADING,
    (State.LOADING, Event.ANSWERED): State.WARMING,
    (State.WARMING, Event.WARMED): State.READY,
    (State.READY, Event.DRAIN): State.DRAINING,
    (State.DRAINING, Event.STOP): State.STOPPING,
    (State.STOPPING, Event.GONE): State.STOPPED,
    (State.BACKOFF, Event.RETRY): State.STARTING,
    (State.BACKOFF, Event.GIVE_UP): State.FAILED,
    (State.BACKOFF, Event.STOP): State.STOPPED,
    (State.FAILED, Event.STOP): State.STOPPED,
    **{(state, Event.STOP): State.STOPPING for state in _ALIVE},
    **{(state, Event.DIED): State.BACKOFF for state in _ALIVE},
}


def next_state(state: State, event: Event) -> State:
    """The state after `event`. Raises KeyError for a transition that does not exist: a bug of the caller."""
    return TRANSITIONS[state, event]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Restarts within `window_s` up to `max_restarts`; the wait doubles from 0.5 s to 30 s."""

    max_restarts: int
    window_s: float
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0

    def wait_s(self, deaths_monotonic_s: list[float], now_monotonic_s: float) -> float | None:
        """How long to wait before the next start, or None when it must not be started again.

        `deaths_monotonic_s`: all deaths so far, the newest included.
        """
        recent = sum(1 for at in deaths_monotonic_s if now_monotonic_s - at <= self.window_s)
        if recent > self.max_restarts:
            return None
        return min(self.first_wait_s * 2.0 ** max(0, recent - 1), self.longest_wait_s)
