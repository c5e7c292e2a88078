"""A change of a running rack, one step after the other: what starts next, what goes, what must go first. Pure.

Asked anew before each step with the memory that is free then. The same decision leads forward to the new layout and,
when a step failed, back to the old one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llamarack.plan.record import CPU_INDEX
from llamarack.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A replica as this decision sees it. `needs_bytes`: by card index, -1 for the host."""

    id: str
    model: str
    needs_bytes: Mapping[int, int] = field(default_factory=dict)
    is_ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Load `replica` and warm it up. The next step follows when it is ready."""

    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Let `replica` finish what runs, then end it. `makes_room_for`: its memory is needed before that can start."""

    replica: str
    makes_room_for: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """`replica` stays, but is not ready yet: nothing more of its model may go before it is."""

    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """`replica` does not fit, and nothing is left that could go for it."""

    replica: str
    device: int
    needs_bytes: int
    free_bytes: int

    @property
    def words(self) -> str:
        where = "the host" if self.device == CPU_INDEX else f"card {self.device}"
        needs, free = format_bytes(self.needs_bytes), format_bytes(max(0, self.free_bytes))
        return f"{self.replica} needs {needs} on {where}, {free} are free"


Step = Start | Stop | Await


def ready_by_model(units: Collection[Unit]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for unit in units:
        counts[unit.model] = counts.get(unit.model, 0) + unit.is_ready
    return counts


def next_step(
    running: Sequence[Unit],
    wanted: Sequence[Unit],
    free_bytes: Mapping[int, int],
    ready_before: Mapping[str, int],
    *,
    waits: bool = True,
) -> Step | Blocked | None:
    """The step to take now; None when exactly `wanted` runs.

    `running`: every replica that holds memory or a place, the wanted ones among them by the same id. `ready_before`:
    ready replicas by model when the change began. A model never has fewer than that, or than it shall have when that
    is less, as long as something that is still to come fits beside what runs. `waits`: whether it is worth waiting for
    replicas that stay and are not ready.
    """
    here, there = {unit.id for unit in running}, {unit.id for unit in wanted}
    surplus = [unit for unit in running if unit.id not in there]
    pending = [unit for unit in wanted if unit.id not in here]
    for unit in surplus:
        if not unit.is_ready:  # it serves nobody, and may hold the one load that is allowed at a time
            return Stop(replica=unit.id)
    ready = ready_by_model(running)
    awaited = {unit.model for unit in pending}
    models = {unit.model for unit in wanted}
    by_id = {unit.id: unit for unit in running}
    for unit in surplus:
        is_replaced = unit.model in models and unit.model not in awaited
        is_spare = ready[unit.model] > ready_before.get(unit.model, 0)
        if not pending or is_replaced or is_spare:
            staying = [each for each in wanted if each.model == unit.model and each.id in here]
            late = next((each for each in staying if not by_id[each.id].is_ready), None)
            floor = min(ready_before.get(unit.model, 0), len(staying))
            if waits and late is not None and ready[unit.model] <= floor:
                return Await(replica=late.id)
            return Stop(replica=unit.id)
    if not pending:
        return None
    for unit in pending:
        if not _lacks(unit, free_bytes):
            return Start(replica=unit.id)
    for unit in pending:
        victim = _victim(unit, surplus, free_bytes, models, ready)
        if victim is not None:
            return Stop(replica=victim.id, makes_room_for=unit.id)
    first = pending[0]
    device = max(_lacks(first, free_bytes).items(), key=lambda item: item[1])[0]
    free = free_bytes.get(device, 0)
    return Blocked(replica=first.id, device=device, needs_bytes=first.needs_bytes[device], free_bytes=free)


def foreseen(
    running: Sequence[Unit], wanted: Sequence[Unit], free_bytes: Mapping[int, int], ready_before: Mapping[str, int]
) -> tuple[tuple[Step, ...], Blocked | None]:
    """All steps, if each does what the plan says; with what stands in the way of the rest, if something does."""
    steps: list[Step] = []
    now, free = list(running), dict(free_bytes)
    by_id = {unit.id: unit for unit in (*running, *wanted)}
    while True:
        step = next_step(now, wanted, free, ready_before)
        if step is None or isinstance(step, Blocked):
            return tuple(steps), step
        steps.append(step)
        unit = by_id[step.replica]
        now = [each for each in now if each.id != unit.id]
        if not isinstance(step, Stop):
            now.append(replace(unit, is_ready=True))
        if isinstance(step, Await):
            continue
        sign = -1 if isinstance(step, Start) else 1
        for device, needs in unit.needs_bytes.items():
            free[device] = free.get(device, 0) + sign * needs


def _lacks(unit: Unit, free_bytes: Mapping[int, int]) -> dict[int, int]:
    """Bytes missing by device."""
    lacks = {device: needs - free_bytes.get(device, 0) for device, needs in unit.needs_bytes.items()}
    return {device: missing for device, missing in lacks.items() if missing > 0}


def _victim(
    unit: Unit,
    surplus: Sequence[Unit],
    free_bytes: Mapping[int, int],
    models: Collection[str],
    ready: Mapping[str, int],
) -> Unit | None:
    """Who goes first so that `unit` fits; None where all of them together would not give it the room.

    Rather one that is enough alone, of a model that leaves the rack, of a model that has more replicas left.
    """
    lacks = _lacks(unit, free_bytes)
    for device, missing in lacks.items():
        if sum(each.needs_bytes.get(device, 0) for each in surplus) < missing:
            return None
    helpful = [each for each in surplus if any(each.needs_bytes.get(device, 0) > 0 for device in lacks)]

    def rank(each: Unit) -> tuple[bool, bool, int, bool]:
        is_enough = all(each.needs_bytes.get(device, 0) >= missing for device, missing in lacks.items())
        return (not is_enough, each.model in models, -ready[each.model], each.model != unit.model)

    return min(helpful, key=rank)
