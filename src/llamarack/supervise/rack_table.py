"""The rows of the table that gateways get, from the replicas as they are now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llamarack.config import Deployment, Model
from llamarack.supervise.replica import Replica
from llamarack.supervise.state import State
from llamarack.supervise.table import ModelRow, ReplicaRow


def served_models(deployment: Deployment, replicas: Iterable[Replica]) -> list[Model]:
    """The file's, and in a change what comes or goes for as long as it is ready."""
    served = {model.name: model for model in deployment.models}
    for replica in replicas:
        if replica.state is State.READY:
            served.setdefault(replica.spec.model.name, replica.spec.model)
    return list(served.values())


def model_rows(models: Iterable[Model], *, created_unix_s: int) -> tuple[ModelRow, ...]:
    return tuple(
        ModelRow(
            name=model.name,
            created_unix_s=created_unix_s,
            defaults=model.defaults,
            max_output_tokens=model.max_output_tokens,
        )
        for model in models
    )


def replica_rows(replicas: Iterable[Replica], shares: Mapping[str, float]) -> tuple[ReplicaRow, ...]:
    """`shares`: of those on trial."""
    return tuple(_row(replica, shares.get(replica.id)) for replica in replicas)


def _row(replica: Replica, share: float | None) -> ReplicaRow:
    candidate = replica.spec.candidate
    return ReplicaRow(
        id=replica.id,
        model=replica.spec.model.name,
        engine=replica.spec.group.engine,
        state=replica.state,
        endpoint=replica.endpoint,
        slots=candidate.sequences,
        context_tokens=candidate.context_tokens,
        kv_tokens=candidate.context_tokens if candidate.kv_unified else None,
        share=share,
    )
