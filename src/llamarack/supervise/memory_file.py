"""The state file: what a new supervisor needs to take running processes back. Mode 0600: it holds engine keys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from llamarack.config import Group, plain
from llamarack.supervise.canary import Trial
from llamarack.supervise.degrade import Rung
from llamarack.supervise.journal import Journal
from llamarack.supervise.replica_record import Death, Degraded, Remembered
from llamarack.supervise.state import State
from llamarack.supervise.table import endpoint_from_json, endpoint_to_json

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedReplica:
    """`start_ticks`: of the engine process; with the keeper's socket in a private folder it is an identity."""

    id: str
    fingerprint: str
    start_ticks: int | None
    memory: Remembered
    spec: dict[str, Any] | None = None  # see spec_json


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGateway:
    control_socket: Path
    start_ticks: int | None
    settings: str  # what the worker was started with, so that a changed file is noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    supervisor_pid: int
    gateways: Sequence[SavedGateway]
    replicas: Sequence[SavedReplica]
    generation: int = 1
    change: SavedChange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedChange:
    """A change in its middle. `old`: specs of the layout that it leaves, which a failure brings back."""

    generation: int
    deployment: dict[str, Any]
    old: Sequence[dict[str, Any]]
    trial: Trial | None
    going_back: str | None  # why, once it does


class StateFile:
    """The file of one rack, written whole at every change. A disk that refuses is told once, and once more when the
    file is right again: the rack itself serves on."""

    def __init__(self, path: Path, journal: Journal) -> None:
        self._path = path
        self._journal = journal
        self._is_stale = False

    def write(self, memory: Memory) -> None:
        """In one step."""
        fresh = self._path.with_suffix(".new")
        try:
            with open(fresh, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(orjson.dumps(_to_json(memory)))
            os.replace(fresh, self._path)
        except OSError as error:
            if not self._is_stale:
                self._is_stale = True
                self._journal.warn(
                    "state_unwritable",
                    f"`{self._path}` cannot be written: {error.strerror}; a restart would reload models",
                    hint=f"df -h {self._path.parent}",
                )
            return
        if self._is_stale:
            self._is_stale = False
            self._journal.note("state_writable", "written again: a restart would find the models that run")


def _to_json(memory: Memory) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "supervisor_pid": memory.supervisor_pid,
        "generation": memory.generation,
        "change": asdict(memory.change) if memory.change else None,
        "gateways": [
            {"control_socket": str(each.control_socket), "start_ticks": each.start_ticks, "settings": each.settings}
            for each in memory.gateways
        ],
        "replicas": [
            {
                "id": each.id,
                "fingerprint": each.fingerprint,
                "start_ticks": each.start_ticks,
                "endpoint": endpoint_to_json(each.memory.endpoint),
                "control_socket": str(each.memory.control_socket),
                "was_ready": each.memory.was_ready,
                "restarts": each.memory.restarts,
                "last_death": asdict(each.memory.last_death) if each.memory.last_death else None,
                "spec": each.spec,
                "degraded": _degraded_to_json(each.memory.degraded),
            }
            for each in memory.replicas
        ],
    }


def read(path: Path) -> Memory | None:
    """None when there is none, or it was written by another version or damaged: then nothing is taken back."""
    try:
        value: dict[str, Any] = orjson.loads(path.read_bytes())
        if value["schema_version"] != SCHEMA_VERSION:
            return None
        return Memory(
            supervisor_pid=value["supervisor_pid"],
            gateways=[
                SavedGateway(
                    control_socket=Path(each["control_socket"]),
                    start_ticks=each["start_ticks"],
                    settings=each["settings"],
                )
                for each in value["gateways"]
            ],
            replicas=[_replica(each) for each in value["replicas"]],
            generation=value.get("generation", 1),
            change=_change(value.get("change")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _replica(value: dict[str, Any]) -> SavedReplica:
    endpoint = endpoint_from_json(value["endpoint"])
    assert endpoint is not None
    return SavedReplica(
        id=value["id"],
        fingerprint=value["fingerprint"],
        start_ticks=value["start_ticks"],
        memory=Remembered(
            endpoint=endpoint,
            control_socket=Path(value["control_socket"]),
            was_ready=value["was_ready"],
            restarts=value["restarts"],
            last_death=_death(value["last_death"]),
            degraded=_degraded(value.get("degraded")),
        ),
        spec=value.get("spec"),
    )


def _change(value: dict[str, Any] | None) -> SavedChange | None:
    if value is None:
        return None
    return SavedChange(**{**value, "trial": Trial(**value["trial"]) if value["trial"] else None})


def _death(value: dict[str, Any] | None) -> Death | None:
    if value is None:
        return None
    return Death(**{**value, "while_state": State(value["while_state"]), "log_tail": tuple(value["log_tail"])})


def _degraded_to_json(degraded: Degraded | None) -> dict[str, Any] | None:
    if degraded is None:
        return None
    return {
        "rungs": [asdict(rung) for rung in degraded.rungs],
        "group": plain(degraded.group),
        "path": str(degraded.path),
    }


def _degraded(value: dict[str, Any] | None) -> Degraded | None:
    if value is None:
        return None
    from llamarack.config import validated  # only where there is something to take back

    return Degraded(
        rungs=tuple(Rung(**rung) for rung in value["rungs"]),
        group=validated(Group, value["group"]),
        path=Path(value["path"]),
    )
