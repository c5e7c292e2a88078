"""Which replica gets a request. Pure: table and counts in, choice out."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow

_GOLDEN_RATIO = (5**0.5 - 1) / 2


def ready_replicas(replicas: Sequence[ReplicaRow], model: str) -> list[ReplicaRow]:
    return [row for row in replicas if row.model == model and row.state is State.READY and row.endpoint is not None]


def whose_turn(rows: Sequence[ReplicaRow], in_flight: Mapping[str, int], turn: int) -> Sequence[ReplicaRow]:
    """Those with a `share` for that part of the turns and never for more, else the rest; all where there is one kind.

    Multiples of the golden ratio spread evenly, also over every second or third turn.
    """
    on_trial = [row for row in rows if row.share is not None and in_flight.get(row.id, 0) < row.slots]
    others = [row for row in rows if row.share is None]
    share = sum(row.share or 0.0 for row in rows)
    if not others:
        return rows
    return on_trial if on_trial and turn * _GOLDEN_RATIO % 1 < share else others


def choose(
    replicas: Sequence[ReplicaRow], in_flight: Mapping[str, int], *, excluded: Container[str] = (), turn: int = 0
) -> ReplicaRow | None:
    """The least loaded of `replicas` that has a free slot, or None.

    `excluded`: endpoint keys. Load is the share of slots taken, so that unequal replicas fill alike; `turn` (any
    growing number) breaks ties, so that an idle rack does not send everything to the first.
    """
    usable = [row for row in replicas if row.endpoint is not None and row.endpoint.key not in excluded]
    free = [row for row in whose_turn(usable, in_flight, turn) if in_flight.get(row.id, 0) < row.slots]
    if not free:
        return None
    lowest = min(in_flight.get(row.id, 0) / row.slots for row in free)
    equal = [row for row in free if in_flight.get(row.id, 0) / row.slots == lowest]
    return equal[turn % len(equal)]
