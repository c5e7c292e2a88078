"""The replica table: what the supervisor tells every gateway worker, whole, at each change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamarack.config import Defaults, plain
from llamarack.engine.dialect import Endpoint
from llamarack.supervise.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """One replica. `slots`: sequences it takes at once; `context_tokens`: of one sequence. `kv_tokens`: of a KV cache
    that its sequences share, where the plan knows it; None: each has its own, or the engine tells. `share`: on trial,
    it gets this fraction of its model's requests; None: its part of the rest."""

    id: str
    model: str
    engine: str
    state: State
    endpoint: Endpoint | None
    slots: int
    context_tokens: int
    kv_tokens: int | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    name: str
    created_unix_s: int
    defaults: Defaults
    max_output_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`draining`: admit nothing new. `version` only grows."""

    version: int
    draining: bool
    models: tuple[ModelRow, ...]
    replicas: tuple[ReplicaRow, ...]


def to_json(table: Table) -> dict[str, Any]:
    return {
        "version": table.version,
        "draining": table.draining,
        "models": [
            {
                "name": model.name,
                "created_unix_s": model.created_unix_s,
                "defaults": plain(model.defaults),
                "max_output_tokens": model.max_output_tokens,
            }
            for model in table.models
        ],
        "replicas": [
            {
                "id": row.id,
                "model": row.model,
                "engine": row.engine,
                "state": row.state.value,
                "endpoint": endpoint_to_json(row.endpoint),
                "slots": row.slots,
                "context_tokens": row.context_tokens,
                "kv_tokens": row.kv_tokens,
                "share": row.share,
            }
            for row in table.replicas
        ],
    }


def from_json(value: dict[str, Any]) -> Table:
    return Table(
        version=value["version"],
        draining=value["draining"],
        models=tuple(ModelRow(**{**model, "defaults": Defaults(**model["defaults"])}) for model in value["models"]),
        replicas=tuple(
            ReplicaRow(**{**row, "state": State(row["state"]), "endpoint": endpoint_from_json(row["endpoint"])})
            for row in value["replicas"]
        ),
    )


def endpoint_to_json(endpoint: Endpoint | None) -> dict[str, Any] | None:
    if endpoint is None:
        return None
    return {**asdict(endpoint), "socket": str(endpoint.socket) if endpoint.socket else None}


def endpoint_from_json(value: dict[str, Any] | None) -> Endpoint | None:
    if value is None:
        return None
    return Endpoint(**{**value, "socket": Path(value["socket"]) if value["socket"] else None})
