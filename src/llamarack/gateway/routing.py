"""Which replica gets a request. Pure: table and counts in, choice out."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow


def ready_replicas(replicas: Sequence[ReplicaRow], model: str) -> list[ReplicaRow]:
    return [row for row in replicas if row.model == model and row.state is State.READY and row.endpoint is not None]


def choose(
    replicas: Sequence[ReplicaRow], in_flight: Mapping[str, int], *, excluded: Container[str] = (), turn: int = 0
) -> ReplicaRow | None:
    """The least loaded of `replicas` that has a free slot, or None.

    `excluded`: endpoint keys. Load is the share of slots taken, so that unequal replicas fill alike; `turn` (any
    growing number) breaks ties, so that an idle rack does not send everything to the first.
    """
    free = [
        row
        for row in replicas
        if row.endpoint is not None and row.endpoint.key not in excluded and in_flight.get(row.id, 0) < row.slots
    ]
    if not free:
        return None
    lowest = min(in_flight.get(row.id, 0) / row.slots for row in free)
    equal = [row for row in free if in_flight.get(row.id, 0) / row.slots == lowest]
    return equal[turn % len(equal)]
