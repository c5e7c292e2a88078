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
    """A replica as this decision sees it. `needs_bytes`: its own, by card index, -1 for the host.

    `mapped_path`, `mapped_bytes`: weights on the host, the same pages for every replica of one file.
    """

    id: str
    model: str
    needs_bytes: Mapping[int, int] = field(default_factory=dict)
    mapped_path: str | None = None
    mapped_bytes: int = 0
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

    `running`: every replica that holds memory or a place, the wanted ones among them by the same id. `free_bytes`: by
    device; mapped weights of what runs count as free there, as the kernel counts them. `ready_before`: ready replicas
    by model when the change began. A model never has fewer than that, or than it shall have when that
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
    room = _room(running, free_bytes)
    for unit in pending:
        if not _lacks(unit, running, room):
            return Start(replica=unit.id)
    for unit in pending:
        victim = _victim(unit, surplus, running, room, models)
        if victim is not None:
            return Stop(replica=victim.id, makes_room_for=unit.id)
    first = pending[0]
    device, missing = max(_lacks(first, running, room).items(), key=lambda item: item[1])
    return Blocked(replica=first.id, device=device, needs_bytes=room[device] + missing, free_bytes=room[device])


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
            if device in free:
                free[device] += sign * needs


def _room(running: Collection[Unit], free_bytes: Mapping[int, int]) -> dict[int, int]:
    """What is free beside what runs and the weights that it maps."""
    mapped = {unit.mapped_path: unit.mapped_bytes for unit in running}
    return {d: free - (sum(mapped.values()) if d == CPU_INDEX else 0) for d, free in free_bytes.items()}


def _taken(units: Collection[Unit], others: Collection[Unit]) -> dict[int, int]:
    """By device, what `units` hold that `others` do not hold as well."""
    taken: dict[int, int] = {}
    for unit in units:
        for device, needs in unit.needs_bytes.items():
            taken[device] = taken.get(device, 0) + needs
    shared = {unit.mapped_path for unit in others}
    mapped = {unit.mapped_path: unit.mapped_bytes for unit in units if unit.mapped_path not in shared}
    if any(mapped.values()):
        taken[CPU_INDEX] = taken.get(CPU_INDEX, 0) + sum(mapped.values())
    return taken


def _lacks(unit: Unit, running: Collection[Unit], room: Mapping[int, int]) -> dict[int, int]:
    """Bytes missing by device; one whose free memory is not known is left to the engine."""
    lacks = {d: needs - room[d] for d, needs in _taken([unit], running).items() if d in room}
    return {device: missing for device, missing in lacks.items() if missing > 0}


def _victim(
    unit: Unit,
    surplus: Sequence[Unit],
    running: Sequence[Unit],
    room: Mapping[int, int],
    models: Collection[str],
) -> Unit | None:
    """Who goes first so that `unit` fits; None where all of them together would not give it the room.

    Rather one that is enough alone, of a model that leaves the rack, of a model that has more replicas left.
    """
    lacks = _lacks(unit, running, room)

    def gives(group: Sequence[Unit]) -> dict[int, int]:
        return _taken(group, [each for each in running if each not in group])

    def is_enough(group: Sequence[Unit]) -> bool:
        given = gives(group)
        return all(given.get(device, 0) >= missing for device, missing in lacks.items())

    if not is_enough(surplus):
        return None
    ready = ready_by_model(running)

    def rank(each: Unit) -> tuple[bool, bool, int, bool]:
        return (not is_enough([each]), each.model in models, -ready[each.model], each.model != unit.model)

    return min((each for each in surplus if any(device in _taken([each], ()) for device in lacks)), key=rank)
