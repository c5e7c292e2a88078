"""From a deployment that was read again to the change that leads there, judged before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llamarack.config import Deployment
from llamarack.errors import DoesNotFit, UsageError
from llamarack.supervise import generation
from llamarack.supervise.canary import Trial
from llamarack.supervise.change import Change, is_leaving
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.supervise.rolling import Step
from llamarack.supervise.state import State

if TYPE_CHECKING:
    from llamarack.supervise.supervisor import Supervisor


def change_to(
    rack: Supervisor, deployment: Deployment, specs: Sequence[ReplicaSpec], *, restart: bool, trial: Trial | None
) -> Change:
    """`specs`: the layout of `deployment`. `restart`: replaces also replicas that are what the file asks for."""
    staying = [replica for replica in rack.replicas if not is_leaving(replica.state)]
    present = [
        generation.Present(
            id=replica.id,
            fingerprint="" if restart else replica.spec.fingerprint,
            is_ready=replica.state is State.READY,
        )
        for replica in staying
    ]
    number = rack.generation + 1
    return Change(
        rack,
        generation=number,
        deployment=deployment,
        old=[replica.spec for replica in staying],
        new=generation.matched(present, specs, number),
        trial=trial,
    )


def require_possible(change: Change, free_bytes: Mapping[int, int]) -> Sequence[Step]:
    """Its steps. Raises DoesNotFit, and UsageError for a trial of nothing."""
    steps, blocked = change.foresee(free_bytes)
    if blocked is not None:
        raise DoesNotFit(f"no room: {blocked.words}", hint="llamarack plan shows what fits")
    if change.trial is not None and not change.on_trial():
        raise UsageError(
            "there is nothing to try out: the file changes no replica of a model that runs",
            hint="llamarack reload without --canary; --restart replaces unchanged replicas too",
        )
    return steps
