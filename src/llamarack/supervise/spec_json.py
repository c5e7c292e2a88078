"""A replica's spec in the state file, so that a supervisor that returns can serve on what its file no longer describes
while it changes over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamarack.config import Deployment, Group, Model, plain
from llamarack.engine.adaptor import Adaptor
from llamarack.plan.record import Candidate
from llamarack.supervise.replica_record import ReplicaSpec


def spec_to_json(spec: ReplicaSpec) -> dict[str, Any]:
    return {
        "id": spec.id,
        "model": plain(spec.model),
        "group": plain(spec.group),
        "path": str(spec.path),
        "candidate": asdict(spec.candidate),
        "card_uuids": list(spec.card_uuids),
        "has_template": spec.has_template,
        "start_deadline_s": spec.start_deadline_s,
        "is_deadline_auto": spec.is_deadline_auto,
        "fingerprint": spec.fingerprint,
    }


def spec_from_json(value: Any, adaptors: Mapping[str, Adaptor]) -> ReplicaSpec | None:
    """None for one that another version wrote in a form that this one does not read."""
    from pydantic import TypeAdapter  # only where there is something to take back

    from llamarack.config import validated

    try:
        group = validated(Group, value["group"])
        return ReplicaSpec(
            id=value["id"],
            model=validated(Model, value["model"]),
            group=group,
            path=Path(value["path"]),
            candidate=TypeAdapter(Candidate).validate_python(value["candidate"]),
            card_uuids=value["card_uuids"],
            adaptor=adaptors[group.engine],
            has_template=value["has_template"],
            start_deadline_s=value["start_deadline_s"],
            is_deadline_auto=value["is_deadline_auto"],
            fingerprint=value["fingerprint"],
        )
    except (KeyError, TypeError, ValueError):
        return None


def deployment_from_json(value: Any) -> Deployment | None:
    from llamarack.config import validated  # same

    try:
        return validated(Deployment, value)
    except (TypeError, ValueError):
        return None
