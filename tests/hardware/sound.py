"""What `check` sees on a sound machine with two H200, and copies of it with one thing changed."""

import dataclasses
from collections.abc import Callable
from typing import Any

from llamarack.hardware.cards import cards_of, cuda_version
from llamarack.hardware.disk import ModelDisk
from llamarack.hardware.environment import Environment
from llamarack.hardware.evidence import Evidence
from llamarack.hardware.functional import Collective, Functional, Outcome, PairResult, ReduceResult
from llamarack.hardware.machine import Host, Machine
from llamarack.hardware.nvml import sysfs_name
from llamarack.hardware.pci import PciCard
from llamarack.hardware.versions import EngineBuild
from llamarack.units import GIB, KIB, MIB
from tests.hardware.recorded import changed, nvml_record

HOST = Host(
    processor="Xeon",
    cores_usable=32,
    instruction_sets=("avx2", "amx_tile"),
    memory_total_bytes=256 * GIB,
    memory_available_bytes=240 * GIB,
    numa_nodes=2,
    kernel="6.8.0",
)
ENVIRONMENT = Environment(
    variables={},
    device_nodes={"nvidia0": "ok", "nvidia1": "ok", "nvidiactl": "ok", "nvidia-uvm": "ok"},
    in_container=False,
    nvswitch_present=True,
    fabric_manager_running=True,
    shm_total_bytes=128 * GIB,
    memlock_bytes=8 * MIB,
    memlock_hard_bytes=8 * MIB,
    open_files=65536,
    open_files_hard=1048576,
    iommu_translates=False,
    numa_nodes_usable=(0, 1),
    engines=(),
)
BUILDS = (
    EngineBuild(engine="vllm", version="0.25.1", interpreter="/opt/vllm/bin/python", cuda="13.0"),
    EngineBuild(engine="llamacpp", version="b11434", interpreter="/opt/rack/python", gpu_devices=("CUDA0", "CUDA1")),
)
DISK = ModelDisk(
    path="/data/m.gguf",
    size_bytes=13 * GIB,
    file_system="xfs",
    is_network=False,
    is_rotational=False,
    free_bytes=500 * GIB,
    cached_fraction=0.0,
    read_bytes_per_s=3e9,
    read_direct=True,
)
# Two H200 over 18 NVLinks, NCCL launched one by one.
COLLECTIVE = Collective(
    backend="nccl",
    world=2,
    outcome=Outcome.OK,
    reduces=(
        ReduceResult(size_bytes=8 * KIB, seconds=39e-6, correct=True),
        ReduceResult(size_bytes=MIB, seconds=38e-6, correct=True),
        ReduceResult(size_bytes=64 * MIB, seconds=251e-6, correct=True),
    ),
)
FUNCTIONAL = Functional(
    card_indices=(0, 1),
    pairs=tuple(
        PairResult(source_index=a, target_index=1 - a, direct=direct, outcome=Outcome.OK, bandwidth_bytes_per_s=379e9)
        for direct in (False, True)
        for a in (0, 1)
    ),
    context_bytes={0: 500 * MIB, 1: 500 * MIB},
    collective=COLLECTIVE,
)


def evidence_of(record: dict[str, Any]) -> Evidence:
    return Evidence(
        machine=Machine(
            host=HOST,
            cards=cards_of(record),
            driver_version=record["driver_version"],
            cuda_version=cuda_version(record),
        ),
        driver_status=record["status"],
        driver_detail=record["detail"],
        lost_cards=tuple(record["lost"]),
        mig_without_slices=tuple(
            device["name"] for device in record["devices"] if device["mig_enabled"] and not device["mig_devices"]
        ),
        pci_cards=tuple(
            PciCard(pci_bus_id=sysfs_name(device["pci_bus_id"]), vendor="nvidia", device_id="0x2335", driver="nvidia")
            for device in nvml_record()["devices"]
        ),
        environment=ENVIRONMENT,
        builds=BUILDS,
        disks=(DISK,),
        functional=FUNCTIONAL,
    )


def sound() -> Evidence:
    return evidence_of(nvml_record())


def with_record(change: Callable[[dict[str, Any]], object]) -> Evidence:
    return evidence_of(changed(nvml_record(), change))


def with_device(**readings: Any) -> Evidence:
    """Other NVML readings of the first card."""
    return with_record(lambda record: record["devices"][0].update(readings))


def with_environment(**values: Any) -> Evidence:
    return dataclasses.replace(sound(), environment=dataclasses.replace(ENVIRONMENT, **values))


def with_variables(**variables: str) -> Evidence:
    return with_environment(variables=variables)


def with_host(**values: Any) -> Evidence:
    evidence = sound()
    return dataclasses.replace(
        evidence, machine=dataclasses.replace(evidence.machine, host=dataclasses.replace(HOST, **values))
    )


def with_disk(**values: Any) -> Evidence:
    return dataclasses.replace(sound(), disks=(dataclasses.replace(DISK, **values),))


def with_builds(*builds: EngineBuild) -> Evidence:
    return dataclasses.replace(sound(), builds=builds)


def with_functional(**values: Any) -> Evidence:
    return dataclasses.replace(sound(), functional=dataclasses.replace(FUNCTIONAL, **values))


def with_collective(**values: Any) -> Evidence:
    return with_functional(collective=dataclasses.replace(COLLECTIVE, **values))


def with_pair(*, direct: bool, outcome: Outcome) -> Evidence:
    """Another outcome of the copy from card 0 to card 1."""
    return with_functional(
        pairs=tuple(
            dataclasses.replace(pair, outcome=outcome) if pair.direct is direct and pair.source_index == 0 else pair
            for pair in FUNCTIONAL.pairs
        )
    )
