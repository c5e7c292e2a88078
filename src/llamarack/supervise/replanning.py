"""One replica planned again on the machine as it is now, beside what else of the rack will want its share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llamarack.config import Deployment, Group
from llamarack.engine.builds import build_of, with_rpc_devices
from llamarack.hardware.detect import detect_machine
from llamarack.model.read import read_model
from llamarack.plan.devices import claim
from llamarack.supervise.layout import plan_again
from llamarack.supervise.own_memory import without_engines
from llamarack.supervise.replica_record import ReplicaSpec

Planner = Callable[[Deployment, ReplicaSpec, Group, Path, Sequence[ReplicaSpec], Mapping[int, int]], ReplicaSpec]


def plan_on_this_machine(
    deployment: Deployment,
    was: ReplicaSpec,
    group: Group,
    path: Path,
    waiting: Sequence[ReplicaSpec],
    own: Mapping[int, int],
) -> ReplicaSpec:
    """`waiting`: replicas that do not run at the moment and will take their share again. `own`: memory by pid of the
    engine that is planned anew, where it runs already."""
    machine = without_engines(with_rpc_devices(detect_machine(), [group]), own)
    claimed: dict[int, int] = {}
    for each in waiting:
        claim(claimed, each.candidate.cards, each.candidate.host_bytes)
    return plan_again(
        was,
        group,
        path,
        machine,
        read_model(path),
        deployment.supervise,
        build=build_of(group, machine),
        claimed_bytes=claimed,
        is_kv_shared=sum(len(model.groups) for model in deployment.models) > 1,
    )
