"""Whether a replica has room for one more. Pure.

llama.cpp: a slot is the reservation. Where sequences share one pool of KV cache (vLLM, llama.cpp with `kv_unified`)
the tokens that the running requests will hold must fit the pool too. What they will hold is a guess: the pool's limit
is moved by what the engine shows, up while it has room that nobody uses, down when it had to preempt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from llamarack.engine.dialect import KvUse
from llamarack.supervise.table import ReplicaRow

# Additive up, multiplicative down: a preempted sequence is computed again, an unused page only waits.
_LEAST, _MOST = 0.5, 4.0
_STEP_UP = 0.05
_FACTOR_DOWN = 0.8
# Sequences at every stage of their growth fill half or more of what they will hold in the end: less means that the
# guesses are too high (a shared prefix, say), more that they may all be right.
_ROOMY_FRACTION = 0.50
# Of what the fullest look has shown, each look keeps so much: requests that began together also grow together, and a
# moment between two such waves says nothing of the next one's height.
_PEAK_KEPT = 0.95
_FULL_FRACTION = 0.95


class Held(NamedTuple):
    """Reservations on one replica, or of one request. `slots`: sequences that run at once; a request for several
    choices takes as many."""

    slots: int = 0
    tokens: int = 0

    def plus(self, other: Held) -> Held:
        return Held(self.slots + other.slots, self.tokens + other.tokens)


NOTHING = Held()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The KV cache of one replica, which its sequences share. `page_tokens`: each takes whole pages; 1 where the engine
    does not tell. `overcommit`: reservations over tokens, as learned. `peak_fraction`: how full it was lately."""

    kv_tokens: int
    page_tokens: int = 1
    overcommit: float = 1.0
    preemptions: int | None = None
    peak_fraction: float = 0.0

    @property
    def limit_tokens(self) -> int:
        return int(self.kv_tokens * self.overcommit)


def has_room(row: ReplicaRow, held: Held, wanted: Held, pool: Pool | None) -> bool:
    """A request alone on its replica always has: the engine itself refuses what never fits."""
    if not held.slots:
        return row.slots > 0
    if held.slots + wanted.slots > row.slots:
        return False
    if pool is None:
        return True
    # The last page of each is half empty, on average: nothing with 16 tokens a page, a third of a short request's with
    # the 128 of vLLM on the processor.
    lost = (held.slots + wanted.slots) * (pool.page_tokens // 2)
    return held.tokens + wanted.tokens + lost <= pool.limit_tokens


def corrected(pool: Pool | None, seen: KvUse, *, turned_away: bool) -> Pool | None:
    """The pool after one look at the engine. `turned_away`: a request waits here for tokens and not for a slot."""
    kv_tokens = seen.kv_tokens or (pool.kv_tokens if pool else None)
    if not kv_tokens:
        return pool
    page_tokens = seen.page_tokens or (pool.page_tokens if pool else 1)
    known = replace(pool or Pool(kv_tokens=kv_tokens), kv_tokens=kv_tokens, page_tokens=page_tokens)
    before, now = known.preemptions, seen.preemptions
    used = seen.used_fraction
    peak = max(used or 0.0, known.peak_fraction * _PEAK_KEPT)
    known = replace(known, preemptions=now if now is not None else before, peak_fraction=peak)
    if before is not None and now is not None and now > before:
        return replace(known, overcommit=max(_LEAST, known.overcommit * _FACTOR_DOWN))
    if used is None:
        return known
    if used >= _FULL_FRACTION and known.overcommit > 1.0:
        return replace(known, overcommit=max(1.0, known.overcommit * _FACTOR_DOWN))
    if peak < _ROOMY_FRACTION and turned_away and not seen.waiting:
        return replace(known, overcommit=min(_MOST, known.overcommit + _STEP_UP))
    return known
