"""Records: what a replica is, why it went down, what of it survives its supervisor. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.config import Group, Model
from llamarack.engine.adaptor import Adaptor
from llamarack.engine.dialect import Endpoint
from llamarack.plan.record import Candidate
from llamarack.supervise.degrade import Rung
from llamarack.supervise.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What a replica is; `fingerprint` changes when a running engine no longer is what the file asks for."""

    id: str
    model: Model
    group: Group
    path: Path
    candidate: Candidate
    card_uuids: Sequence[str]
    adaptor: Adaptor
    has_template: bool
    start_deadline_s: float
    fingerprint: str
    is_deadline_auto: bool = False  # by size: a load that moves may take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Why a replica went down; the newest is shown by `status`."""

    at_unix_s: float
    while_state: State
    cause: str
    message: str
    hint: str | None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What survives the supervisor: enough to take the engine back."""

    endpoint: Endpoint
    control_socket: Path
    was_ready: bool
    restarts: int = 0
    last_death: Death | None = None
    degraded: Degraded | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Degraded:
    """The smaller plan that a replica runs with after out of memory, and the rungs that led to it."""

    rungs: tuple[Rung, ...]
    group: Group
    path: Path
