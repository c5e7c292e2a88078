"""Records: what a machine has. No I/O. Units: bytes, bytes per second, watts; `None` is "not known", never zero.

`schema_version` counts changes of meaning; added keys do not raise it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SCHEMA_VERSION = 1


class LinkKind(StrEnum):
    """How two cards reach each other, best first."""

    NVLINK = "nvlink"
    PCIE_SWITCH = "pcie_switch"  # one or more PCIe switches, no host bridge (nvidia-smi topo: PIX, PXB)
    PCIE_HOST = "pcie_host"  # through the host bridge of one NUMA node (PHB, NODE)
    CROSS_SOCKET = "cross_socket"  # through the processor interconnect (SYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a card's connection to `peer_index`. `bandwidth_bytes_per_s`: one direction, nominal."""

    peer_index: int
    kind: LinkKind
    lanes: int | None = None  # NVLink: links between the pair
    generation: int | None = None
    bandwidth_bytes_per_s: float | None = None
    peer_to_peer: bool | None = None  # what the driver says; `check` proves it by copying


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProcess:
    """Somebody's memory on a card."""

    pid: int
    memory_bytes: int | None
    name: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU, or one MIG slice, which is a card of its own. `index` counts in PCI bus order."""

    index: int
    uuid: str | None
    vendor: str
    name: str
    memory_total_bytes: int
    memory_free_bytes: int | None
    compute_capability: tuple[int, int] | None = None
    pci_bus_id: str | None = None
    links: tuple[Link, ...] = ()
    memory_bandwidth_bytes_per_s: float | None = None
    fp16_flops_per_s: float | None = None  # dense tensor-core peak
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    numa_node: int | None = None
    mig_parent_uuid: str | None = None
    ecc_enabled: bool | None = None
    persistence_enabled: bool | None = None
    power_limit_watts: float | None = None
    power_limit_default_watts: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    temperature_celsius: float | None = None
    temperature_slowdown_celsius: float | None = None  # the card lowers its clocks from here
    utilization_fraction: float | None = None
    ecc_uncorrected_errors: int | None = None  # since the driver was loaded
    row_remap: str | None = None  # `pending`: a reset finishes it; `failed`: the card is to be replaced
    nvlinks_active: int | None = None
    nvlinks_total: int | None = None
    fabric_state: str | None = None  # `not started`, `in progress`, `completed`; None: no switch fabric
    processes: tuple[CardProcess, ...] = ()
    rpc_server: str | None = None  # `host:port` where llama.cpp reaches it over the network
    is_rpc_busy: bool = False  # it serves another client; its memory is what it said before
    is_host_memory: bool = False  # an RPC device that is this computer's own processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The computer around the cards, as the cgroup lets us use it."""

    processor: str | None
    cores_usable: int  # affinity and cgroup quota, rounded down, at least 1
    instruction_sets: tuple[str, ...]  # the kernel's names of those that engines use: `avx2`, `amx_tile`
    memory_total_bytes: int  # the smaller of RAM and the cgroup limit
    memory_available_bytes: int
    numa_nodes: int = 1
    memory_bandwidth_bytes_per_s: float | None = None
    kernel: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One server, as a plan sees it."""

    schema_version: int = SCHEMA_VERSION
    host: Host
    cards: tuple[Card, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None  # highest the driver supports
    remotes: tuple[Card, ...] = ()  # devices of RPC servers that a deployment file names; never in `check`
