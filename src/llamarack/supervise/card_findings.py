"""What is wrong on the cards from look to look: other tenants, faults, throttling, use beyond the plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarack.hardware.card_state import CardState
from llamarack.hardware.machine import CardProcess
from llamarack.units import MIB, format_bytes

# What a desktop or a monitoring agent holds is no tenant; a process that takes this much is.
_FOREIGN_LEAST_BYTES = 256 * MIB
# Over the plan's upper bound by this: the plan, or the engine, is wrong.
_OVER_PLAN_FRACTION = 0.02
# NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, 2026): those after which the card needs help.
_XID_WORDS = {
    13: "an illegal access by a program on the card",
    31: "a memory page fault of a program on the card",
    43: "a program on the card was stopped",
    45: "a program was ended after an earlier fault",
    48: "a double-bit ECC error: reset the card, replace it if it comes back",
    61: "the card's firmware halted: reset the card",
    62: "the card's firmware halted: reset the card",
    63: "a row of memory is being remapped: reset the card when it can be spared",
    64: "a row of memory could not be remapped: replace the card",
    74: "an NVLink error: reseat the bridge, look at the links",
    79: "the card has fallen off the bus: power, seating, temperature",
    92: "a high rate of single-bit ECC errors",
    94: "a contained ECC error: the program that met it was ended",
    95: "an uncontained ECC error: reset the card",
    119: "the card's system processor does not answer: reboot, update the driver",
    120: "the card's system processor failed: reboot, update the driver",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`key`: the same as long as it lasts, so that it is told once."""

    key: str
    severity: str
    kind: str
    message: str
    hint: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the rack means to have on one card. `high_bytes`: the upper bound over all its replicas there."""

    high_bytes: int


def card_findings(
    card: CardState, before: CardState | None, owners: Mapping[int, str], planned: Planned | None
) -> list[Finding]:
    """`owners`: the rack's own processes, with the replica of each. Conditions that last have a key that lasts."""
    found = [_foreign(card, process) for process in _foreigners(card, owners)]
    found += [_xid(card, xid) for xid in card.xids]
    if card.throttle_reasons:
        reasons = ", ".join(card.throttle_reasons)
        found.append(
            Finding(
                key=f"throttled {card.index} {reasons}",
                severity="warning",
                kind="card_throttled",
                message=f"card {card.index} lowers its clocks: {reasons}",
                hint="nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE; power limit, cooling, or the power supply",
                data={"card": card.uuid, "reasons": list(card.throttle_reasons), "temperature_c": card.temperature_c},
            )
        )
    if before is not None and (card.ecc_uncorrected or 0) > (before.ecc_uncorrected or 0):
        found.append(
            Finding(
                key=f"ecc {card.index} {card.ecc_uncorrected}",
                severity="error",
                kind="card_ecc",
                message=f"card {card.index} counts {card.ecc_uncorrected} uncorrected memory errors",
                hint="nvidia-smi -q -d ECC,ROW_REMAPPER; reset the card, replace it if they come back",
                data={"card": card.uuid, "ecc_uncorrected": card.ecc_uncorrected},
            )
        )
    ours = sum(process.memory_bytes or 0 for process in card.processes if process.pid in owners)
    if planned is not None and ours > planned.high_bytes * (1 + _OVER_PLAN_FRACTION):
        found.append(
            Finding(
                key=f"over plan {card.index}",
                severity="warning",
                kind="memory_over_plan",
                message=f"card {card.index}: this rack's engines hold {format_bytes(ours)}, at most "
                f"{format_bytes(planned.high_bytes)} were planned",
                hint="llamarack status --json shows predicted and actual by term",
                data={"card": card.uuid, "actual_bytes": ours, "planned_high_bytes": planned.high_bytes},
            )
        )
    return found


def _foreigners(card: CardState, owners: Mapping[int, str]) -> list[CardProcess]:
    """Processes of others that hold much. Where none of the rack's own is seen, pids are another namespace's, and
    nobody can be told from anybody."""
    if owners and not any(process.pid in owners for process in card.processes) and not _knows(card):
        return []
    return [
        process
        for process in card.processes
        if process.pid not in owners and (process.memory_bytes or 0) >= _FOREIGN_LEAST_BYTES
    ]


def _knows(card: CardState) -> bool:
    """Whether any process on the card has a name here: then its pid is one of ours to read."""
    return any(process.name is not None for process in card.processes)


def _foreign(card: CardState, process: CardProcess) -> Finding:
    user = f", user {process.user}" if process.user else ""
    who = f"process {process.pid}" + (f" ({process.name}{user})" if process.name else "")
    return Finding(
        key=f"foreign {card.index} {process.pid}",
        severity="warning",
        kind="foreign_process",
        message=f"card {card.index}: {who}, which is not of this rack, holds {format_bytes(process.memory_bytes)}",
        hint="it is left alone; move it to another card, or plan around it: llamarack plan FILE",
        data={"card": card.uuid, "pid": process.pid, "bytes": process.memory_bytes, "user": process.user},
    )


def _xid(card: CardState, xid: int) -> Finding:
    return Finding(
        key=f"xid {card.index} {xid}",
        severity="error",
        kind="card_xid",
        message=f"card {card.index}: the driver reports Xid {xid}"
        + (f": {_XID_WORDS[xid]}" if xid in _XID_WORDS else ""),
        hint="sudo dmesg | grep -i xid; nvidia-smi -q",
        data={"card": card.uuid, "xid": xid},
    )


def bound_by(card: CardState, engine_cores: float | None, owners: Mapping[int, str], has_work: bool) -> str | None:
    """What holds the card's work up: `other_tenant`, `cpu`, `memory` (its bandwidth) or `compute`; None: idle, unknown.

    `engine_cores`: processor cores that the engines on this card keep busy. A card whose use jumps between 0 and 99 %
    while a core of its engine is busy waits for that core (tokenising, sampling, scheduling).
    """
    if not has_work or card.utilisation_fraction is None:
        return None
    if any(
        process.pid not in owners and (process.memory_bytes or 0) >= _FOREIGN_LEAST_BYTES for process in card.processes
    ):
        return "other_tenant"
    if card.utilisation_fraction < 0.6:
        return "cpu" if engine_cores is not None and engine_cores >= 0.9 else None
    if card.memory_utilisation_fraction is None:
        return None
    # NVML counts time in which memory was read or written, not the rate; decoding keeps it above half, prompts below.
    return "memory" if card.memory_utilisation_fraction >= 0.5 else "compute"


def only_new(found: Sequence[Finding], known: set[str]) -> list[Finding]:
    """Those not told yet; `known` becomes the keys of `found`, so that what ends and comes back is told again."""
    fresh = [finding for finding in found if finding.key not in known or finding.kind == "card_xid"]
    known.clear()
    known.update(finding.key for finding in found)
    return fresh
