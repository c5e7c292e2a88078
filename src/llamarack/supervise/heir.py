"""What survives a supervisor, and what the next one of the same rack takes back of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamarack.config import Deployment
from llamarack.engine.adaptor import Adaptor
from llamarack.supervise.journal import Journal
from llamarack.supervise.keeping import KeptChild, attach_child
from llamarack.supervise.memory_file import Memory, SavedChange, SavedReplica
from llamarack.supervise.replica import Replica
from llamarack.supervise.replica_record import Remembered, ReplicaSpec
from llamarack.supervise.spec_json import deployment_from_json, spec_from_json, spec_to_json
from llamarack.supervise.state import State

if TYPE_CHECKING:
    from llamarack.supervise.canary import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A change to go on with. `going_back`: why, where it does."""

    generation: int
    old: Sequence[ReplicaSpec]
    new: Sequence[ReplicaSpec]
    trial: Trial | None = None
    going_back: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heritage:
    """`specs`: the replicas that the rack begins with; `adopted`: those of them whose engine runs, by id."""

    generation: int
    specs: Sequence[ReplicaSpec]
    adopted: Mapping[str, tuple[KeptChild, Remembered]]
    unfinished: Unfinished | None = None


def saved_replicas(replicas: Sequence[Replica]) -> list[SavedReplica]:
    """For the state file: those that have a process."""
    return [
        SavedReplica(
            id=replica.id,
            fingerprint=replica.spec.fingerprint,
            start_ticks=replica.child.start_ticks,
            memory=Remembered(
                endpoint=replica.endpoint,
                control_socket=replica.child.control_socket,
                was_ready=replica.state is State.READY,
                restarts=replica.restarts,
                last_death=replica.last_death,
                degraded=replica.degraded,
            ),
            spec=spec_to_json(replica.asked_spec),
        )
        for replica in replicas
        if replica.child is not None and replica.endpoint is not None
    ]


async def take_back(
    remembered: Memory | None,
    specs: Sequence[ReplicaSpec],
    deployment: Deployment,
    adaptors: Callable[[], Mapping[str, Adaptor]],
    journal: Journal,
) -> Heritage:
    """Attaches to engines that outlived their supervisor. `specs`: what the file asks for.

    What the file no longer describes serves on until a change has replaced it: that change comes back too, also one in
    whose middle the supervisor died.
    """
    if remembered is None:
        return Heritage(generation=1, specs=specs, adopted={})
    from llamarack.supervise import generation  # a first start has nothing to match

    attached = [each for saved in remembered.replicas if (each := await _attach(saved)) is not None]
    number = remembered.generation + 1
    present = [generation.Present(id=saved.id, fingerprint=saved.fingerprint) for saved, _ in attached]
    wanted = generation.matched(present, specs, number)
    by_id = {spec.id: spec for spec in wanted}
    adopted: dict[str, tuple[KeptChild, Remembered]] = {}
    left_over: dict[str, ReplicaSpec] = {}
    for saved, child in attached:
        if saved.id not in by_id:
            spec = spec_from_json(saved.spec, adaptors()) if saved.memory.was_ready else None
            if spec is None:
                journal.note("ended_leftover", "an engine that the file no longer describes", replica=saved.id)
                await child.stop()
                await child.release()
                continue
            left_over[saved.id] = spec
        adopted[saved.id] = (child, saved.memory)
    broken_off = remembered.change
    if not left_over and broken_off is None:
        return Heritage(generation=remembered.generation, specs=wanted, adopted=adopted)
    here = {**left_over, **{id: spec for id, spec in by_id.items() if id in adopted}}
    if broken_off is None:
        journal.note("change_resumed", "engines run that the file no longer describes: they serve until replaced")
        unfinished = Unfinished(generation=number, old=list(here.values()), new=wanted)
    else:
        unfinished = _gone_on_with(broken_off, number, here, wanted, deployment, adaptors())
        journal.note(
            "change_resumed",
            f"the change to generation {broken_off.generation} was broken off in its middle; it goes on",
        )
    return Heritage(generation=remembered.generation, specs=list(here.values()), adopted=adopted, unfinished=unfinished)


async def _attach(saved: SavedReplica) -> tuple[SavedReplica, KeptChild] | None:
    child = await attach_child(saved.memory.control_socket)
    if child is None:
        return None
    if child.exit is None and child.start_ticks == saved.start_ticks:
        return saved, child
    if child.exit is None:
        await child.stop()
    await child.release()
    return None


def _gone_on_with(
    broken_off: SavedChange,
    number: int,
    here: Mapping[str, ReplicaSpec],
    wanted: Sequence[ReplicaSpec],
    deployment: Deployment,
    adaptors: Mapping[str, Adaptor],
) -> Unfinished:
    """From what is still there (`here`, by id) to what the file asks for now.

    A change that was going back goes back; one on trial is tried anew, if the file still asks for the same.
    """
    saved = [spec_from_json(value, adaptors) for value in broken_off.old]
    old = [spec for spec in saved if spec is not None]
    is_same = deployment_from_json(broken_off.deployment) == deployment
    return Unfinished(
        generation=number,
        old=old,
        new=wanted,
        trial=broken_off.trial if is_same and any(spec.id in here for spec in old) else None,
        going_back=broken_off.going_back if is_same else None,
    )
