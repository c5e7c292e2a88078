"""Record: all that `check` saw, before anything is judged."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarack.hardware.disk import ModelDisk
from llamarack.hardware.environment import Environment
from llamarack.hardware.functional import Functional
from llamarack.hardware.machine import Machine
from llamarack.hardware.pci import PciCard
from llamarack.hardware.versions import EngineBuild


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a deployment file asks of the machine. `engines`: those that are to use cards; empty without a file."""

    engines: frozenset[str] = frozenset()
    locks_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """A look that gave nothing. `subject`: what was looked at."""

    subject: str
    detail: str
    hung: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenPort:
    host: str
    port: int
    reason: str  # the kernel's words


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """None and empty are "not looked at or not answered"; then no rule speaks of it."""

    machine: Machine
    driver_status: str  # `ok`, `absent`, `no_driver`, `failed`, `hung`
    driver_detail: str | None = None
    lost_cards: tuple[str, ...] = ()
    mig_without_slices: tuple[str, ...] = ()  # names of cards
    pci_cards: tuple[PciCard, ...] = ()
    environment: Environment | None = None
    builds: tuple[EngineBuild, ...] = ()
    disks: tuple[ModelDisk, ...] = ()
    taken_ports: tuple[TakenPort, ...] = ()
    unanswered: tuple[Unanswered, ...] = ()
    functional: Functional | None = None
    wanted: Wanted = field(default_factory=Wanted)
