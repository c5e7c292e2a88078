"""Which faults do the cards themselves show? Pure rules: evidence in, findings out, one fault each."""

from __future__ import annotations

from collections.abc import Iterator

from llamarack.hardware.evidence import Evidence
from llamarack.hardware.finding import Finding, Severity
from llamarack.hardware.machine import Card, LinkKind
from llamarack.units import GIB, MIB, format_bytes

# Below this a process is a desktop or a monitoring agent, not a model.
_FOREIGN_BYTES = 256 * MIB
# Driver and firmware keep less than this for themselves on an idle card (H200, driver 580: 0.6 GiB).
_IDLE_BYTES = 1 * GIB
_THROTTLING = {
    "thermal_software": "its temperature",
    "thermal_hardware": "its temperature, in hardware",
    "hardware_slowdown": "the hardware's slowdown signal",
    "power_brake": "the power supply's brake signal",
}


def memory_faults(evidence: Evidence) -> Iterator[Finding]:
    for card in evidence.machine.cards:
        if card.row_remap == "failed":
            yield _on(
                card,
                "memory_remap_failed",
                Severity.ERROR,
                seen="a bad memory row could not be replaced by a spare one",
                why="results can be wrong and processes are killed at that address",
                fix="take the card out of service and return it; nvidia-smi -q -d ROW_REMAPPER is the proof",
            )
        elif card.row_remap == "pending":
            yield _on(
                card,
                "memory_remap_pending",
                Severity.WARNING,
                seen="a bad memory row waits to be replaced by a spare one",
                why="until the card is reset the bad row is still in use",
                fix=f"stop what uses the card, then sudo nvidia-smi --gpu-reset -i {card.pci_bus_id}",
            )
        if card.ecc_uncorrected_errors:
            yield _on(
                card,
                "memory_errors",
                Severity.WARNING,
                seen=f"{card.ecc_uncorrected_errors} uncorrected memory error(s) since the driver was loaded",
                why="each one ends the process it hits; more than one points to a failing card",
                fix="nvidia-smi -q -d ECC,ROW_REMAPPER; reset the card, and return it if the count rises again",
            )


def held_back(evidence: Evidence) -> Iterator[Finding]:
    """Throttling now, heat, a lowered power limit."""
    for card in evidence.machine.cards:
        reasons = [_THROTTLING[reason] for reason in card.throttle_reasons if reason in _THROTTLING]
        limit, default = card.power_limit_watts, card.power_limit_default_watts
        if reasons:
            yield _on(
                card,
                "throttled",
                Severity.WARNING,
                seen=f"clocks are lowered now by {' and '.join(reasons)}",
                why="every token takes longer, and tensor parallel runs at the pace of the slowest card",
                fix="check fans, air flow and power cables; nvidia-smi -q -d PERFORMANCE,TEMPERATURE shows the effect",
            )
        elif (
            card.temperature_celsius is not None
            and card.temperature_slowdown_celsius is not None
            and card.temperature_celsius >= card.temperature_slowdown_celsius - 3
        ):
            yield _on(
                card,
                "hot",
                Severity.WARNING,
                seen=f"{card.temperature_celsius:g} °C, clocks fall from {card.temperature_slowdown_celsius:g} °C on",
                why="under load it will throttle",
                fix="check fans and air flow before a benchmark or a service starts",
            )
        if limit is not None and default is not None and limit < 0.9 * default:
            yield _on(
                card,
                "power_limited",
                Severity.NOTE,
                seen=f"power limit {limit:g} W, the card's default is {default:g} W",
                why="long prompts run slower than predicted",
                fix=f"if it is not meant: sudo nvidia-smi -i {card.pci_bus_id} -pl {default:g}",
            )


def persistence(evidence: Evidence) -> Iterator[Finding]:
    off = [card for card in evidence.machine.cards if card.persistence_enabled is False]
    if off:
        yield Finding(
            code="persistence_off",
            severity=Severity.NOTE,
            subject=_names(off),
            seen="persistence mode is off",
            why="the driver unloads between processes, so each start waits for the card to wake",
            fix="sudo systemctl enable --now nvidia-persistenced (needs root; lasts over reboots)",
        )


def pcie(evidence: Evidence) -> Iterator[Finding]:
    """Width does not change with load; generation does, so it counts only while the card works."""
    for card in evidence.machine.cards:
        width, width_max = card.pcie_width, card.pcie_width_max
        generation, generation_max = card.pcie_generation, card.pcie_generation_max
        if width is not None and width_max is not None and width < width_max:
            yield _on(
                card,
                "pcie_narrow",
                Severity.WARNING,
                seen=f"PCIe x{width} now, x{width_max} at best",
                why="loading and traffic between cards take longer in that proportion",
                fix="reseat the card, use a slot with all lanes, check the riser and the BIOS bifurcation setting",
            )
        busy = (card.utilization_fraction or 0) >= 0.5
        if busy and generation is not None and generation_max is not None and generation < generation_max:
            yield _on(
                card,
                "pcie_slow",
                Severity.WARNING,
                seen=f"PCIe generation {generation} under load, {generation_max} at best",
                why="loading and traffic between cards take longer",
                fix="set the slot to its highest generation in the BIOS; check the riser",
            )


def nvlinks(evidence: Evidence) -> Iterator[Finding]:
    if len(evidence.machine.cards) < 2:
        return
    for card in evidence.machine.cards:
        active, total = card.nvlinks_active, card.nvlinks_total
        if active is not None and total and active < total:
            yield _on(
                card,
                "nvlink_down",
                Severity.WARNING,
                seen=f"{active} of {total} NVLinks are active",
                why="cards then exchange data more slowly, or over PCIe",
                fix="nvidia-smi nvlink --status and nvidia-smi nvlink -e; reseat the bridge or reset the cards",
            )


def only_pcie(evidence: Evidence) -> Iterator[Finding]:
    links = [link for card in evidence.machine.cards for link in card.links]
    if links and not any(link.kind is LinkKind.NVLINK for link in links):
        worst = "through both sockets" if any(link.kind is LinkKind.CROSS_SOCKET for link in links) else "by PCIe"
        yield Finding(
            code="cards_linked_by_pcie",
            severity=Severity.NOTE,
            subject="cards",
            seen=f"the cards reach each other {worst} only, there is no NVLink",
            why="tensor parallel over several cards can be slower than one card here",
            fix="one full copy per card where the model fits: llamarack plan MODEL compares both",
        )


def unequal(evidence: Evidence) -> Iterator[Finding]:
    kinds = sorted({f"{card.name} ({format_bytes(card.memory_total_bytes)})" for card in evidence.machine.cards})
    if len(kinds) > 1:
        yield Finding(
            code="cards_unequal",
            severity=Severity.NOTE,
            subject="cards",
            seen="; ".join(kinds),
            why="vLLM uses of every card only what the smallest one has",
            fix="engine: llamacpp with split_mode: layer and tensor_split: auto shares by free memory",
        )


def foreign_memory(evidence: Evidence) -> Iterator[Finding]:
    for card in evidence.machine.cards:
        large = [process for process in card.processes if (process.memory_bytes or 0) > _FOREIGN_BYTES]
        used = None if card.memory_free_bytes is None else card.memory_total_bytes - card.memory_free_bytes
        for process in large:
            yield _on(
                card,
                "memory_in_use",
                Severity.WARNING,
                seen=f"{format_bytes(process.memory_bytes)} held by process {process.pid} "
                f"({process.name or 'name not visible'}, user {process.user or 'not visible'})",
                why="a plan counts this memory as gone, and the other process slows every request on this card",
                fix=f"if it is not meant to stay: kill {process.pid}; else give other cards in `gpus:`",
            )
        if not large and used is not None and used > _IDLE_BYTES:
            yield _on(
                card,
                "memory_in_use",
                Severity.WARNING,
                seen=f"{format_bytes(used)} in use by processes that are not visible from here",
                why="another container or user holds it, or a dead engine's worker was left behind",
                fix="nvidia-smi on the host names them; fuser -v /dev/nvidia* finds workers without a parent",
            )


def _on(card: Card, code: str, severity: Severity, *, seen: str, why: str, fix: str) -> Finding:
    return Finding(code=code, severity=severity, subject=f"card {card.index}", seen=seen, why=why, fix=fix)


def _names(cards: list[Card]) -> str:
    return "cards " + ", ".join(str(card.index) for card in cards) if len(cards) > 1 else f"card {cards[0].index}"


RULES = (
    memory_faults,
    held_back,
    persistence,
    pcie,
    nvlinks,
    only_pcie,
    unequal,
    foreign_memory,
)
