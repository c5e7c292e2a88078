"""Which replica gets a request. Pure: table and counts in, choice out.

least_loaded: the smallest share of its slots taken. round_robin: each in turn. session: always the same one for a
conversation, since it holds the prefix; while that one is full, the least loaded. A session's replica follows from
its name alone (rendezvous hashing), so that every gateway worker knows it, and a replica that goes moves only its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow

Policy = Literal["least_loaded", "round_robin", "session"]

SESSION_HEADERS = ("x-session-id", "x-conversation-id")
_SESSION_FIELDS = ("prompt_cache_key", "user")
# Of a plain prompt: enough to tell conversations apart, and the same in every turn of one.
_PREFIX_CHARACTERS = 256


def ready_replicas(replicas: Sequence[ReplicaRow], model: str) -> list[ReplicaRow]:
    return [row for row in replicas if row.model == model and row.state is State.READY and row.endpoint is not None]


def choose(
    free: Sequence[ReplicaRow],
    load: Callable[[ReplicaRow], float],
    *,
    policy: Policy = "least_loaded",
    turn: int = 0,
    chosen_at: Mapping[str, int] | None = None,
    session: bytes | None = None,
    homes: Sequence[ReplicaRow] = (),
) -> ReplicaRow | None:
    """One of `free`, those that have room; None where there is none.

    `load`: share of a replica's slots taken. `turn`: any growing number; breaks ties, so that an idle rack does not
    send everything to the first. `chosen_at`: the turn at which each was chosen last. `homes`: every replica that may
    hold a session, with room or without.
    """
    if not free:
        return None
    if policy == "round_robin":
        before = chosen_at or {}
        return min(free, key=lambda row: before.get(row.id, -1))
    if policy == "session" and session is not None:
        home = home_of(session, homes or free)
        if home in free:
            return home
    loads = [load(row) for row in free]
    lowest = min(loads)
    equal = [row for row, share in zip(free, loads, strict=True) if share == lowest]
    return equal[turn % len(equal)]


def home_of(session: bytes, replicas: Sequence[ReplicaRow]) -> ReplicaRow:
    return max(replicas, key=lambda row: hashlib.blake2b(row.id.encode() + b"\0" + session, digest_size=8).digest())


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> bytes | None:
    """A header, else a field made for it, else how the prompt begins: what all turns of one conversation share."""
    for name in SESSION_HEADERS:
        if given := headers.get(name):
            return b"h" + given.encode()
    for name in _SESSION_FIELDS:
        value = body.get(name)
        if isinstance(value, str) and value:
            return b"u" + value.encode(errors="replace")
    return _prefix(body)


def _prefix(body: Mapping[str, Any]) -> bytes | None:
    messages = body.get("messages")
    if isinstance(messages, list):
        begin: list[str] = []
        for message in messages:
            if not isinstance(message, dict):
                return None
            begin.append(repr(message.get("content")))
            if message.get("role") == "user":  # the first question tells one conversation from the next
                break
        return b"m" + hashlib.blake2b("\0".join(begin).encode(errors="replace"), digest_size=16).digest()
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, str) and prompt:
        return b"p" + prompt[:_PREFIX_CHARACTERS].encode(errors="replace")
    return None
