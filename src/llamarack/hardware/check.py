"""Looks at the machine, each look bounded in time, then judges what was seen.

`findings(evidence)` is pure: it applies the rules. `gather` does the looking: all looks but the functional tests run
at once, each in a child of its own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamarack.hardware import (
    environment,
    memory_speed,
    rules_cards,
    rules_disk,
    rules_driver,
    rules_environment,
    rules_functional,
)
from llamarack.hardware.detect import machine_of, nvml_of
from llamarack.hardware.disk import ModelDisk
from llamarack.hardware.evidence import Evidence, TakenPort, Unanswered, Wanted
from llamarack.hardware.finding import Finding, Severity
from llamarack.hardware.functional import Functional, run_functional
from llamarack.hardware.machine import Card, Machine
from llamarack.hardware.pci import read_pci_cards
from llamarack.hardware.probe import Answer, Probe, Status, ask, module_command
from llamarack.hardware.versions import (
    EngineBuild,
    binary_build,
    builds_of,
    installed_command,
    list_devices_command,
)

OVERALL_DEADLINE_S = 55.0  # the promise is 60 s; the rest is for reading the file and printing
_LOOK_DEADLINE_S = 15.0  # every look but the functional tests; they run side by side
_RULES = (
    *rules_driver.RULES,
    *rules_cards.RULES,
    *rules_environment.RULES,
    *rules_disk.RULES,
    *rules_functional.RULES,
)
_WORST_FIRST = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to look at. `interpreters`: of engines, besides our own; the first one with torch runs the functional test.

    `card_indices`: the group the all-reduce runs over; None: all cards.
    """

    model_paths: tuple[Path, ...] = ()
    interpreters: tuple[Path, ...] = ()
    binaries: tuple[Path, ...] = ()
    listen: tuple[tuple[str, int], ...] = ()
    card_indices: tuple[int, ...] | None = None
    functional: bool = True
    wanted: Wanted = field(default_factory=Wanted)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Worst first, and within one severity in the order of the rules."""
    return worst_first(finding for rule in _RULES for finding in rule(evidence))


def worst_first(found: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: _WORST_FIRST.index(finding.severity)))


def gather(request: Request, *, deadline_s: float = OVERALL_DEADLINE_S) -> Evidence:
    ends_monotonic_s = time.monotonic() + deadline_s
    looks = _Looks(request, min(_LOOK_DEADLINE_S, deadline_s))
    nvml = nvml_of(looks.nvml.answer())
    machine = machine_of(nvml)
    surroundings = looks.environment()
    disks = looks.disks()
    builds, torch_builds = looks.builds()
    machine = _with_memory_speed(machine, ends_monotonic_s if request.functional else None)
    functional: Functional | None = None
    if request.functional and nvml["status"] in ("ok", "absent", "no_driver"):
        cards = _group(machine, request.card_indices)
        fit = [path for path, cuda in torch_builds if cuda != "none" or not cards]
        functional = run_functional(cards, fit[0] if fit else None, ends_monotonic_s=ends_monotonic_s)
    return Evidence(
        machine=machine,
        driver_status=nvml["status"],
        driver_detail=nvml["detail"],
        lost_cards=tuple(nvml.get("lost", ())),
        mig_without_slices=tuple(
            device["name"] for device in nvml["devices"] if device["mig_enabled"] and not device["mig_devices"]
        ),
        pci_cards=read_pci_cards(),
        environment=surroundings,
        builds=builds,
        disks=disks,
        taken_ports=taken_ports(request.listen),
        unanswered=tuple(looks.unanswered),
        functional=functional,
        wanted=request.wanted,
    )


def _with_memory_speed(machine: Machine, ends_monotonic_s: float | None) -> Machine:
    """Measured after all other looks, so that nothing of ours shares the memory; what was measured before where this
    gives nothing. None: not to be measured.
    """
    host = machine.host
    size = memory_speed.buffer_bytes(host)
    if ends_monotonic_s is not None and size is not None:
        left_s = min(memory_speed.DEADLINE_S, ends_monotonic_s - time.monotonic())
        answer = ask(module_command("memory_speed", str(host.cores_usable), str(size)), deadline_s=left_s)
        if answer.status is Status.OK:
            return replace(machine, host=replace(host, **answer.values))
    return replace(machine, host=memory_speed.with_remembered_bandwidth(host))


class _Looks:
    """Children that run side by side from construction on; each is asked once."""

    def __init__(self, request: Request, deadline_s: float) -> None:
        self.unanswered: list[Unanswered] = []
        self._deadline_s = deadline_s
        self.nvml = Probe(module_command("nvml"), deadline_s=deadline_s)
        self._environment = Probe(module_command("environment"), deadline_s=deadline_s)
        self._disks = [(path, Probe(module_command("disk", str(path)), deadline_s=deadline_s))
                       for path in request.model_paths]  # fmt: skip
        own = installed_command()[0]
        named = [path for path in map(str, request.interpreters) if path != own]
        self._installed = [(path, self._start(installed_command(path), path)) for path in (*named, None)]
        self._binaries = [(path, self._start(list_devices_command(path), str(path))) for path in request.binaries]

    def _start(self, command: Sequence[str], subject: str | None) -> Probe | None:
        try:
            return Probe(command, deadline_s=self._deadline_s)
        except OSError as error:
            self.unanswered.append(Unanswered(subject=subject or command[0], detail=str(error), hung=False))
            return None

    def environment(self) -> environment.Environment | None:
        answer = self._environment.answer()
        return environment.from_json(answer.values) if self._is_ok(answer, "environment") else None

    def disks(self) -> tuple[ModelDisk, ...]:
        answers = [(path, probe.answer()) for path, probe in self._disks]
        return tuple(ModelDisk(**answer.values) for path, answer in answers if self._is_ok(answer, str(path)))

    def builds(self) -> tuple[tuple[EngineBuild, ...], list[tuple[str, str]]]:
        """Engines found, and the interpreters with torch and its CUDA version; named ones before our own."""
        builds: list[EngineBuild] = []
        with_torch: list[tuple[str, str]] = []
        for path, probe in self._installed:
            answer = probe.answer() if probe else None
            interpreter = path or installed_command()[0]
            if answer is not None and self._is_ok(answer, interpreter):
                builds += builds_of(answer.values, interpreter)
                with_torch += [(interpreter, answer.values["torch_cuda"])] if answer.values["torch"] else []
        for binary, probe in self._binaries:
            text = probe.text() if probe else None
            if text is not None:
                builds.append(binary_build(text, str(binary)))
        return tuple(builds), with_torch

    def _is_ok(self, answer: Answer, subject: str) -> bool:
        if answer.status is not Status.OK:
            detail = answer.detail or answer.status.value
            self.unanswered.append(Unanswered(subject=subject, detail=detail, hung=answer.status is Status.HUNG))
        return answer.status is Status.OK


def _group(machine: Machine, indices: tuple[int, ...] | None) -> list[Card]:
    """Cards one test can use together: of several slices of one card a process sees only the first."""
    cards = [card for card in machine.cards if indices is None or card.index in indices]
    slices = [card for card in cards if card.mig_parent_uuid]
    return slices[:1] if slices else cards


def taken_ports(listen: Sequence[tuple[str, int]]) -> tuple[TakenPort, ...]:
    """Addresses that cannot be bound now. Nothing is reserved: this is for the report, the gateway binds for itself."""
    taken = []
    for host, port in listen:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                taken.append(TakenPort(host=host, port=port, reason=error.strerror or str(error)))
    return tuple(taken)
