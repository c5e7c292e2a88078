"""NVML's raw readings as cards. Pure: the same record, read live or from a file, gives the same cards."""

from __future__ import annotations

import dataclasses
from typing import Any

from llamarack.hardware.machine import Card, CardProcess, Link, LinkKind

# NVML_TOPOLOGY_* of nvml.h: internal 0, single switch 10, several switches 20, host bridge 30, node 40, system 50.
_ANCESTORS = {
    0: LinkKind.PCIE_SWITCH,
    10: LinkKind.PCIE_SWITCH,
    20: LinkKind.PCIE_SWITCH,
    30: LinkKind.PCIE_HOST,
    40: LinkKind.PCIE_HOST,
    50: LinkKind.CROSS_SOCKET,
}
# One direction of one NVLink, by generation: NVIDIA's NVLink page (2026-11), total bandwidth / links / 2.
_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
# The NVLink generation is the chip's: Pascal 1, Volta and Turing 2, Ampere 3, Hopper 4, Blackwell 5 (same page).
_NVLINK_GENERATIONS = {6: 1, 7: 2, 8: 3, 9: 4, 10: 5, 12: 5}
# One direction of one lane after line coding: PCI Express base specifications 1.1 to 6.0.
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_REMOTE_IS_CARD = 0  # NVML_NVLINK_DEVICE_TYPE_GPU
_P2P_OK = 0  # NVML_P2P_STATUS_OK
_FABRIC_STATES = {1: "not started", 2: "in progress", 3: "completed"}  # NVML_GPU_FABRIC_STATE_*; 0: not supported
# nvmlClocksEventReason* of nvml.h. Idle (1) and clocks set by the user (2) are left out: nothing is being held back
# against anybody's will.
THROTTLE_REASONS = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal_software",
    0x40: "thermal_hardware",
    0x80: "power_brake",
    0x100: "display_clocks",
}

Reading = dict[str, Any]


def cards_of(record: Reading) -> tuple[Card, ...]:
    """Cards in PCI bus order. A card in MIG mode is replaced by its slices, each with its own memory."""
    cards: list[Card] = []
    indices: dict[int, int] = {}  # NVML position -> our index, of whole cards
    for position, device in enumerate(record["devices"]):
        if device["mig_enabled"]:
            cards += [_card(device, len(cards) + number, part) for number, part in enumerate(device["mig_devices"])]
        elif device["memory"] is not None:
            indices[position] = len(cards)
            cards.append(_card(device, len(cards)))
    links = _links(record, indices)
    return tuple(dataclasses.replace(card, links=links.get(card.index, ())) for card in cards)


def cuda_version(record: Reading) -> str | None:
    """NVML counts 13000 for 13.0."""
    number = record.get("cuda_version")
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _card(device: Reading, index: int, part: Reading | None = None) -> Card:
    memory = (part or device)["memory"]
    capability = device["compute_capability"]
    return Card(
        index=index,
        uuid=(part or device)["uuid"],
        vendor="nvidia",
        name=(part or device)["name"] or "NVIDIA GPU",
        memory_total_bytes=memory["total"],
        memory_free_bytes=memory["free"],
        compute_capability=None if capability is None else (capability[0], capability[1]),
        pci_bus_id=device["pci_bus_id"],
        memory_bandwidth_bytes_per_s=None if part else _memory_bandwidth(device),
        pcie_generation=device["pcie_generation"],
        pcie_generation_max=device["pcie_generation_max"],
        pcie_width=device["pcie_width"],
        pcie_width_max=device["pcie_width_max"],
        numa_node=device["numa_node"],
        mig_parent_uuid=device["uuid"] if part else None,
        ecc_enabled=device["ecc_enabled"],
        persistence_enabled=device["persistence_enabled"],
        power_limit_watts=_scaled(device["power_limit_mw"], 1 / 1000),
        power_limit_default_watts=_scaled(device["power_limit_default_mw"], 1 / 1000),
        throttle_reasons=_throttle_reasons(device["throttle_mask"]),
        temperature_celsius=device["temperature_c"],
        temperature_slowdown_celsius=device["temperature_slowdown_c"],
        utilization_fraction=None if part else _scaled(device["utilization_percent"], 1 / 100),
        ecc_uncorrected_errors=device["ecc_uncorrected_volatile"],
        row_remap=_row_remap(device["remapped_rows"]),
        nvlinks_active=len([link for link in device["nvlinks"] if link["active"]]),
        nvlinks_total=len(device["nvlinks"]),
        fabric_state=_FABRIC_STATES.get(device["fabric_state"]),
        processes=tuple(
            CardProcess(pid=process["pid"], memory_bytes=process["memory"], name=process["name"], user=process["user"])
            for process in (part or device)["processes"]
        ),
    )


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _row_remap(rows: list[int] | None) -> str | None:
    """`rows`: corrected, uncorrected, pending, failed, as nvmlDeviceGetRemappedRows orders them."""
    _, _, pending, failed = rows or (0, 0, 0, 0)
    return "failed" if failed else "pending" if pending else None


def _memory_bandwidth(device: Reading) -> float | None:
    """Two transfers per clock over the whole bus: double data rate holds for HBM and for GDDR as NVML counts it."""
    bits, clock_mhz = device["memory_bus_bits"], device["memory_clock_max_mhz"]
    return None if not bits or not clock_mhz else bits / 8 * clock_mhz * 1e6 * 2


def _throttle_reasons(mask: int | None) -> tuple[str, ...]:
    return tuple(name for bit, name in THROTTLE_REASONS.items() if mask is not None and mask & bit)


def _links(record: Reading, indices: dict[int, int]) -> dict[int, tuple[Link, ...]]:
    found: dict[int, tuple[Link, ...]] = {}
    for pair in record["pairs"]:
        if pair["from"] in indices and pair["to"] in indices:
            link = _link(record["devices"], pair, indices[pair["to"]])
            if link is not None:
                found[indices[pair["from"]]] = (*found.get(indices[pair["from"]], ()), link)
    return found


def _link(devices: list[Reading], pair: Reading, peer_index: int) -> Link | None:
    here, there = devices[pair["from"]], devices[pair["to"]]
    peer_to_peer = None if pair["p2p_read"] is None else pair["p2p_read"] == _P2P_OK
    lanes = _nvlinks_between(here, there, pair)
    if lanes:
        generation = _NVLINK_GENERATIONS.get((here["compute_capability"] or [0])[0])
        per_lane = _NVLINK_BYTES_PER_S.get(generation or 0)
        return Link(
            peer_index=peer_index,
            kind=LinkKind.NVLINK,
            lanes=lanes,
            generation=generation,
            bandwidth_bytes_per_s=per_lane and lanes * per_lane,
            peer_to_peer=peer_to_peer,
        )
    if pair["ancestor"] not in _ANCESTORS:
        return None
    generation, bandwidth = _slower_pcie(here, there)
    return Link(
        peer_index=peer_index,
        kind=_ANCESTORS[pair["ancestor"]],
        generation=generation,
        bandwidth_bytes_per_s=bandwidth,
        peer_to_peer=peer_to_peer,
    )


def _nvlinks_between(here: Reading, there: Reading, pair: Reading) -> int:
    """Direct links are counted by the far end's PCI id; through switches every active link reaches every card."""
    active: list[Reading] = [link for link in here["nvlinks"] if link["active"]]
    direct = [link for link in active if link["remote_type"] == _REMOTE_IS_CARD]
    if direct:
        return len([link for link in direct if link["remote_pci_bus_id"] == there["pci_bus_id"]])
    if pair["p2p_nvlink"] != _P2P_OK:
        return 0
    return min(len(active), len([link for link in there["nvlinks"] if link["active"]]))


def _slower_pcie(here: Reading, there: Reading) -> tuple[int | None, float | None]:
    """At best, not now: idle cards lower their link's generation."""
    ends = [(device["pcie_generation_max"], device["pcie_width_max"]) for device in (here, there)]
    rates = [
        (lanes * _PCIE_LANE_BYTES_PER_S[generation], generation)
        for generation, lanes in ends
        if generation in _PCIE_LANE_BYTES_PER_S and lanes
    ]
    if len(rates) < 2:
        return None, None
    bandwidth, generation = min(rates)
    return generation, bandwidth
