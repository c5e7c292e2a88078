"""What do the functional tests prove, and which switch cures it? Pure rules; a switch is named only on proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llamarack.hardware.evidence import Evidence
from llamarack.hardware.finding import Finding, Severity
from llamarack.hardware.functional import Outcome, PairResult, bus_rate, slowest_link
from llamarack.units import MIB, format_bytes, format_duration

# Share of the link's nominal rate that an all-reduce of 64 MiB reaches on sound machines, in the customary measure
# 2 (n-1)/n · bytes / time: two H200 over 18 NVLinks, NCCL 251 us = 0.59; two L40S over PCIe 4, 7.0 ms = 0.30;
# eight L40S, 120 ms = 0.03 (AIConfigurator's tables). Below half of the lowest, something is wrong.
_SOUND_SHARE = 0.015
# NCCL launched one by one, 8 KB: 39 us on two H200; 42 us on eight L40S. The bound leaves room for slow processors.
_SMALL_MESSAGE_BYTES = 8 * 1024
_SMALL_MESSAGE_S = 0.002
_IOMMU = (
    "; the IOMMU translates for these cards, the usual cause: boot with iommu=pt or turn it off in the BIOS, "
    "and turn off ACS on the bridges (needs root)"
)


def cuda_start(evidence: Evidence) -> Iterator[Finding]:
    """The driver answers NVML and yet CUDA does not start."""
    functional, environment = evidence.functional, evidence.environment
    if functional is not None and (functional.context_bytes or functional.pairs or functional.peer_detail is None):
        return  # CUDA starts, whatever the fabric says of itself
    detail = functional.peer_detail if functional is not None and functional.peer_detail else "not tried"
    waiting = [card for card in evidence.machine.cards if card.fabric_state in ("not started", "in progress")]
    switched = environment is not None and environment.nvswitch_present and not environment.fabric_manager_running
    # Error 802: the cards hang on switches whose routes the fabric manager has not set up.
    if "SYSTEM_NOT_READY" in detail or waiting:
        yield Finding(
            code="fabric_manager",
            severity=Severity.ERROR,
            subject="fabric manager",
            seen=f"CUDA: {detail}; fabric: {waiting[0].fabric_state if waiting else 'state not known'}"
            + (", its manager does not run here" if switched else ""),
            why="cards behind NVSwitch do not compute until the fabric manager runs, in the driver's own version",
            fix=f"sudo systemctl enable --now nvidia-fabricmanager, of version {evidence.machine.driver_version}",
        )
    elif functional is not None:
        yield Finding(
            code="cuda_does_not_start",
            severity=Severity.ERROR,
            subject="CUDA",
            seen=detail,
            why="the driver lists the cards, and a program cannot use them",
            fix="sudo dmesg | grep -iE 'xid|nvrm'; in a container, start it anew with --gpus all",
        )


def peer_copies(evidence: Evidence) -> Iterator[Finding]:
    functional = evidence.functional
    if functional is None:
        return
    staged = [pair for pair in functional.pairs if not pair.direct and pair.outcome is not Outcome.OK]
    direct = [pair for pair in functional.pairs if pair.direct and pair.outcome is not Outcome.OK]
    if staged:
        yield Finding(
            code="peer_copy_broken",
            severity=Severity.ERROR,
            subject=_pairs(staged),
            seen=f"copies through host memory: {_outcomes(staged)}",
            why="any model spread over these cards gives garbage or hangs",
            fix="serve each card by itself (replicas, no split) and have the cards, slots and risers tested",
        )
    elif direct:
        iommu = evidence.environment is not None and evidence.environment.iommu_translates
        yield Finding(
            code="peer_direct_broken",
            severity=Severity.ERROR,
            subject=_pairs(direct),
            seen=f"direct copies: {_outcomes(direct)}; the same copies through host memory arrive",
            why="the driver says that peer access works and it does not: hangs at start, or silent garbage",
            fix="vllm: env NCCL_P2P_DISABLE=1 and engine_args disable-custom-all-reduce: true; llama.cpp: a build with "
            "-DGGML_CUDA_NO_PEER_COPY=ON" + (_IOMMU if iommu else ""),
        )


def iommu(evidence: Evidence) -> Iterator[Finding]:
    """A suspicion, and only where no test has answered it."""
    tested = evidence.functional is not None and any(pair.direct for pair in evidence.functional.pairs)
    translates = evidence.environment is not None and evidence.environment.iommu_translates
    if translates and len(evidence.machine.cards) > 1 and not tested:
        yield Finding(
            code="iommu_on",
            severity=Severity.NOTE,
            subject="IOMMU",
            seen="it translates addresses for the cards, and direct copies were not tested",
            why="on some boards it drops or corrupts direct copies between cards",
            fix="run llamarack check without --no-functional; if copies break: boot with iommu=pt",
        )


def disabled_without_need(evidence: Evidence) -> Iterator[Finding]:
    functional, environment = evidence.functional, evidence.environment
    if functional is None or environment is None or environment.variables.get("NCCL_P2P_DISABLE") != "1":
        return
    direct = [pair for pair in functional.pairs if pair.direct]
    if direct and all(pair.outcome is Outcome.OK for pair in direct):
        yield Finding(
            code="p2p_disabled",
            severity=Severity.WARNING,
            subject="NCCL_P2P_DISABLE",
            seen=f"NCCL_P2P_DISABLE=1, and all {len(direct)} direct copies arrived",
            why="cards exchange through host memory without need, several times slower",
            fix="unset NCCL_P2P_DISABLE",
        )


def matrix(evidence: Evidence) -> Iterator[Finding]:
    functional = evidence.functional
    if functional is None or functional.collective is None:
        return
    for rank in functional.collective.matrix_wrong_ranks:
        yield Finding(
            code="wrong_result",
            severity=Severity.ERROR,
            subject=f"card {functional.card_indices[rank]}" if functional.card_indices else "processor",
            seen="a product of small integers is not the processor's",
            why="it computes wrongly, so every answer of a model on it is suspect",
            fix="take the card out of `gpus:`; nvidia-smi -q -d ECC,ROW_REMAPPER; have it replaced",
        )


def all_reduce(evidence: Evidence) -> Iterator[Finding]:
    functional = evidence.functional
    collective = functional.collective if functional else None
    if functional is None or collective is None or collective.outcome is Outcome.OK:
        return
    if collective.outcome is Outcome.NOT_REACHED:
        yield Finding(
            code="all_reduce_not_run",
            severity=Severity.WARNING,
            subject="all-reduce",
            seen=f"torch did not start in time: {collective.detail}",
            why="whether the cards add up together is not known",
            fix="run llamarack check again: the second time torch comes from memory",
        )
        return
    reached = f", after {format_bytes(collective.reduces[-1].size_bytes)} went well" if collective.reduces else ""
    cured = functional.without_p2p is not None and functional.without_p2p.outcome is Outcome.OK
    yield Finding(
        code="all_reduce_needs_p2p_off" if cured else "all_reduce_broken",
        severity=Severity.ERROR,
        subject=f"all-reduce, {collective.backend}, {collective.world} ranks",
        seen=f"{collective.outcome.value}{reached}: {collective.detail or 'the sum is not the sum'}"
        + ("; with NCCL_P2P_DISABLE=1 it is right" if cured else ""),
        why="tensor parallel would hang at start or answer garbage",
        fix='env: {NCCL_P2P_DISABLE: "1"} and engine_args: {disable-custom-all-reduce: true} in the group'
        if cured
        else "replicas of one card each work without it; for the cause: NCCL_DEBUG=INFO llamarack check",
    )


def all_reduce_speed(evidence: Evidence) -> Iterator[Finding]:
    collective = evidence.functional.collective if evidence.functional else None
    if collective is None or collective.backend != "nccl" or collective.outcome is not Outcome.OK:
        return
    link = slowest_link(evidence.machine.cards)
    for result in collective.reduces:
        rate = bus_rate(result, collective.world)
        nominal = link.bandwidth_bytes_per_s if link else None
        slow_large = result.size_bytes >= 64 * MIB and nominal is not None and rate < _SOUND_SHARE * nominal
        slow_small = result.size_bytes <= _SMALL_MESSAGE_BYTES and result.seconds > _SMALL_MESSAGE_S
        if collective.world > 1 and (slow_large or slow_small):
            yield Finding(
                code="all_reduce_slow",
                severity=Severity.WARNING,
                subject=f"all-reduce of {format_bytes(result.size_bytes)}, {collective.world} ranks",
                seen=f"{format_duration(result.seconds)} ({rate / 1e9:.1f} GB/s over the link)",
                why="tensor parallel pays this twice per layer and token",
                fix="prefer one copy per card (replicas) here; NCCL_DEBUG=INFO shows the path that was taken",
            )


def not_run(evidence: Evidence) -> Iterator[Finding]:
    functional = evidence.functional
    if evidence.driver_status in ("hung", "failed"):
        return
    if functional is None or functional.collective is None:
        yield Finding(
            code="functional_not_run",
            severity=Severity.NOTE,
            subject="functional test",
            seen="no interpreter with torch is known, so no all-reduce and no matrix product were run"
            if functional is not None
            else "it was left out",
            why="whether the cards work together is only proven by running them together",
            fix="llamarack check --python /path/to/vllm/bin/python"
            if functional is not None
            else "llamarack check, without --no-functional",
        )


def _pairs(pairs: Sequence[PairResult]) -> str:
    return "cards " + ", ".join(f"{pair.source_index} -> {pair.target_index}" for pair in pairs)


def _outcomes(pairs: Sequence[PairResult]) -> str:
    return ", ".join(sorted({pair.outcome.value + (f" ({pair.detail})" if pair.detail else "") for pair in pairs}))


RULES = (
    cuda_start,
    peer_copies,
    iommu,
    disabled_without_need,
    matrix,
    all_reduce,
    all_reduce_speed,
    not_run,
)
