"""Idle slots by model: one event when too few stay idle, one when there are enough again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from llamarack.supervise.journal import Journal
from llamarack.supervise.replica import Replica
from llamarack.supervise.state import State

_LOOK_S = 1.0
# A moment without an idle slot is a busy service; a pool whose slots are held for ever stays so.
SUSTAINED_S = 5.0


def idle_slots(replicas: Iterable[Replica], in_flight: Callable[[str], int]) -> dict[str, int]:
    """By model, of its ready replicas; a model without one has other events."""
    idle: dict[str, int] = {}
    for replica in replicas:
        if replica.state is State.READY:
            free = max(0, replica.spec.candidate.sequences - in_flight(replica.id))
            idle[replica.spec.model.name] = idle.get(replica.spec.model.name, 0) + free
    return idle


class SlotWatch:
    """`least`: idle slots that a model should have; `idle`: how many each has now, of ready replicas only."""

    def __init__(self, least: int, journal: Journal, idle: Callable[[], Mapping[str, int]]) -> None:
        self._least = least
        self._journal = journal
        self._idle = idle
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look(time.monotonic())

    def look(self, now_monotonic_s: float) -> None:
        for model, idle in self._idle().items():
            if idle >= self._least:
                self._since.pop(model, None)
                if model in self._told:
                    self._told.discard(model)
                    self._journal.note("slots_idle_again", f"{model}: {idle} slots are idle again", model=model)
                continue
            since = self._since.setdefault(model, now_monotonic_s)
            if model not in self._told and now_monotonic_s - since >= SUSTAINED_S:
                self._told.add(model)
                self._journal.warn(
                    "slots_low",
                    f"{model}: {idle} slots are idle, supervise.slots_idle_min is {self._least}",
                    model=model,
                    idle=idle,
                    hint="llamarack status shows busy and stuck slots; more replicas or limits.sequences take more",
                )
