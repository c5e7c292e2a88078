"""A sound machine has no findings; each copy with one thing changed has its own finding and no other."""

import dataclasses

import pytest

from llamarack.hardware import rules_environment
from llamarack.hardware.check import findings
from llamarack.hardware.environment import RunningEngine
from llamarack.hardware.evidence import Evidence, TakenPort, Unanswered, Wanted
from llamarack.hardware.finding import Severity
from llamarack.hardware.functional import Collective, Outcome, ReduceResult
from llamarack.hardware.pci import PciCard
from llamarack.hardware.versions import EngineBuild
from llamarack.hardware.visible import Fault
from llamarack.units import GIB, KIB, MIB
from tests.hardware import sound as made
from tests.hardware.recorded import nvml_record
from tests.hardware.sound import sound


def no_driver(status: str, detail: str) -> Evidence:
    """All that hangs on the driver is gone with it."""
    evidence = sound()
    return dataclasses.replace(
        evidence,
        machine=dataclasses.replace(evidence.machine, cards=(), driver_version=None, cuda_version=None),
        driver_status=status,
        driver_detail=detail,
        functional=dataclasses.replace(made.FUNCTIONAL, pairs=(), context_bytes=None)
        if status in ("absent", "no_driver")
        else None,
    )


def other_card() -> Evidence:
    other = PciCard(pci_bus_id="0000:03:00.0", vendor="amd", device_id="0x74a1", driver="amdgpu")
    return dataclasses.replace(sound(), pci_cards=(*sound().pci_cards, other))


def no_cards() -> Evidence:
    return dataclasses.replace(no_driver("absent", "NVML Shared Library Not Found"), pci_cards=())


def third_on_the_bus() -> Evidence:
    third = dataclasses.replace(sound().pci_cards[0], pci_bus_id="0000:99:00.0")
    return dataclasses.replace(sound(), pci_cards=(*sound().pci_cards, third))


def by_pcie() -> Evidence:
    def change(record: dict) -> None:
        for device in record["devices"]:
            device["nvlinks"] = []
        for pair in record["pairs"]:
            pair.update(ancestor=50, p2p_nvlink=5)

    return made.with_record(change)


def unlike_cards(**variables: str) -> Evidence:
    evidence = made.with_device(name="NVIDIA L40S", memory={"total": 48 * GIB, "free": 48 * GIB})
    return dataclasses.replace(evidence, environment=dataclasses.replace(made.ENVIRONMENT, variables=variables))


def link_down(record: dict) -> None:
    record["devices"][0]["nvlinks"][3]["active"] = False


def fabric(state: int) -> Evidence:
    evidence = made.with_record(lambda record: [device.update(fabric_state=state) for device in record["devices"]])
    broken = dataclasses.replace(
        made.FUNCTIONAL, pairs=(), context_bytes=None, peer_detail="cuInit: CUDA_ERROR_SYSTEM_NOT_READY"
    )
    return dataclasses.replace(evidence, functional=broken)


def build(cuda: str) -> EngineBuild:
    return dataclasses.replace(made.BUILDS[0], cuda=cuda)


def driver(version: str) -> Evidence:
    return made.with_record(lambda record: record.update(driver_version=version))


def broken_reduce(second: Outcome, first: Outcome = Outcome.HUNG) -> Evidence:
    broken = Collective(backend="nccl", world=2, outcome=first, detail="no answer within 25 s")
    return made.with_functional(collective=broken, without_p2p=Collective(backend="nccl", world=2, outcome=second))


def slow_reduce(size_bytes: int, seconds: float) -> Evidence:
    return made.with_collective(reduces=(ReduceResult(size_bytes=size_bytes, seconds=seconds, correct=True),))


def process(memory: int, pid: int = 4711) -> dict:
    return {"pid": pid, "memory": memory, "name": "ollama", "user": "bob"}


MEMORY = {"total": 143_771 * MIB, "free": 120_000 * MIB}
CHANGES: dict[str, list[Evidence]] = {
    "driver_hung": [no_driver("hung", "no answer within 15 s")],
    "driver_failed": [no_driver("failed", "Unknown Error"), no_driver("failed", "Driver/library version mismatch")],
    "driver_missing": [no_driver("absent", "not found"), no_driver("no_driver", "Driver Not Loaded")],
    "no_cards": [no_cards()],
    "card_not_supported": [other_card()],
    "card_lost": [dataclasses.replace(sound(), lost_cards=("card 2: GPU is lost",))],
    "card_hidden": [third_on_the_bus()],
    "mig_without_slices": [made.with_device(mig_enabled=True)],
    "memory_remap_failed": [made.with_device(remapped_rows=[0, 1, 0, 1])],
    "memory_remap_pending": [made.with_device(remapped_rows=[0, 1, 1, 0])],
    "memory_errors": [made.with_device(ecc_uncorrected_volatile=2)],
    "throttled": [made.with_device(throttle_mask=bit) for bit in (0x8, 0x20, 0x40, 0x80)],
    "hot": [made.with_device(temperature_c=87)],
    "power_limited": [made.with_device(power_limit_mw=400_000)],
    "persistence_off": [made.with_device(persistence_enabled=False)],
    "pcie_narrow": [made.with_device(pcie_width=8)],
    "pcie_slow": [made.with_device(pcie_generation=3, utilization_percent=90)],
    "nvlink_down": [made.with_record(link_down)],
    "cards_linked_by_pcie": [by_pcie()],
    "cards_unequal": [unlike_cards(CUDA_DEVICE_ORDER="PCI_BUS_ID")],
    "memory_in_use": [
        made.with_device(processes=[process(20 * GIB)], memory=MEMORY),
        made.with_device(processes=[], memory=MEMORY),
    ],
    "driver_too_old": [driver("570.86.15"), driver("535.54.03")],
    "card_unknown_to_build": [
        made.with_record(lambda record: [device.update(compute_capability=[7, 0]) for device in record["devices"][:1]])
    ],
    "engine_without_gpu": [
        made.with_builds(dataclasses.replace(made.BUILDS[1], gpu_devices=())),
        made.with_builds(build("none")),
    ],
    "engine_missing": [dataclasses.replace(sound(), wanted=Wanted(engines=frozenset({"transformers"})))],
    "visible_devices_empty": [made.with_variables(CUDA_VISIBLE_DEVICES="")],
    "visible_devices_none": [made.with_variables(CUDA_VISIBLE_DEVICES="-1")],
    "visible_devices_out_of_range": [made.with_variables(CUDA_VISIBLE_DEVICES="0,2")],
    "visible_devices_twice": [made.with_variables(CUDA_VISIBLE_DEVICES="1,1")],
    "visible_devices_unknown_uuid": [made.with_variables(CUDA_VISIBLE_DEVICES="GPU-00000000")],
    "visible_devices_not_a_card": [made.with_variables(CUDA_VISIBLE_DEVICES="all")],
    "device_missing": [made.with_environment(device_nodes={"nvidia0": "ok", "nvidia1": "missing"})],
    "device_denied": [made.with_environment(device_nodes={"nvidia0": "denied", "nvidiactl": "denied"})],
    "device_no_permission": [made.with_environment(device_nodes={"nvidia0": "no permission"})],
    "device_unreadable": [made.with_environment(device_nodes={"nvidia0": "Input/output error"})],
    "shm_small": [made.with_environment(shm_total_bytes=64 * MIB), made.with_environment(shm_total_bytes=512 * MIB)],
    "open_files": [
        made.with_environment(open_files=1024),
        made.with_environment(open_files=1024, open_files_hard=1024),
    ],
    "memlock": [dataclasses.replace(sound(), wanted=Wanted(locks_memory=True))],
    "few_cores": [made.with_host(cores_usable=7)],
    "numa_far": [
        dataclasses.replace(
            made.with_device(numa_node=0),
            environment=made.with_environment(numa_nodes_usable=(1,)).environment,
        )
    ],
    "p2p_variable_on": [made.with_variables(GGML_CUDA_P2P="0")],
    "engine_running": [made.with_environment(engines=(RunningEngine(pid=7, engine="ollama", user="bob"),))],
    "disk_slow": [
        made.with_disk(read_bytes_per_s=80e6),
        made.with_disk(read_bytes_per_s=10e6),
        made.with_disk(read_bytes_per_s=80e6, is_network=True, file_system="nfs4"),
    ],
    "disk_network": [made.with_disk(is_network=True, file_system="nfs4")],
    "disk_full": [made.with_disk(free_bytes=GIB)],
    "memory_smaller_than_model": [made.with_host(memory_total_bytes=12 * GIB)],
    "port_taken": [
        dataclasses.replace(sound(), taken_ports=(TakenPort(host="127.0.0.1", port=8080, reason="in use"),))
    ],
    "no_answer": [dataclasses.replace(sound(), unanswered=(Unanswered(subject="/nfs/m", detail="15 s", hung=True),))],
    "not_readable": [dataclasses.replace(sound(), unanswered=(Unanswered(subject="/m", detail="gone", hung=False),))],
    "fabric_manager": [fabric(2), fabric(0)],
    "cuda_does_not_start": [
        made.with_functional(pairs=(), context_bytes=None, peer_detail="cuInit: CUDA_ERROR_UNKNOWN")
    ],
    "peer_copy_broken": [made.with_pair(direct=False, outcome=Outcome.WRONG)],
    "peer_direct_broken": [made.with_pair(direct=True, outcome=outcome) for outcome in (Outcome.WRONG, Outcome.HUNG)],
    "iommu_on": [
        dataclasses.replace(
            made.with_environment(iommu_translates=True), functional=dataclasses.replace(made.FUNCTIONAL, pairs=())
        )
    ],
    "p2p_disabled": [made.with_variables(NCCL_P2P_DISABLE="1")],
    "wrong_result": [made.with_collective(matrix_wrong_ranks=(1,))],
    "all_reduce_not_run": [made.with_collective(outcome=Outcome.NOT_REACHED, reduces=(), detail="25 s")],
    "all_reduce_needs_p2p_off": [broken_reduce(Outcome.OK), broken_reduce(Outcome.OK, Outcome.WRONG)],
    "all_reduce_broken": [broken_reduce(Outcome.HUNG), made.with_collective(outcome=Outcome.FAILED, detail="NCCL")],
    "all_reduce_slow": [slow_reduce(8 * KIB, 0.01), slow_reduce(64 * MIB, 0.05)],
    "functional_not_run": [
        dataclasses.replace(sound(), functional=None),
        made.with_functional(collective=None),
    ],
}
CASES = [pytest.param(code, evidence, id=f"{code}-{number}")
         for code, changes in CHANGES.items() for number, evidence in enumerate(changes)]  # fmt: skip


def test_sound_machine_has_no_findings() -> None:
    assert findings(sound()) == ()


@pytest.mark.parametrize(("code", "evidence"), CASES)
def test_one_change_gives_its_own_finding_and_no_other(code: str, evidence: Evidence) -> None:
    found = findings(evidence)
    assert [finding.code for finding in found] == [code]
    assert all(dataclasses.asdict(found[0]).values())


def test_healthy_variants_of_a_machine_have_no_findings() -> None:
    uuids = ",".join(str(card.uuid) for card in sound().machine.cards)
    healthy = [
        made.with_variables(CUDA_VISIBLE_DEVICES="1,0"),
        made.with_variables(CUDA_VISIBLE_DEVICES=uuids),
        made.with_device(pcie_generation=1),  # an idle link
        made.with_device(throttle_mask=0x5),  # idle, at its power cap
        made.with_environment(iommu_translates=True),  # and yet all copies arrived
        made.with_device(processes=[process(50 * MIB)]),  # a desktop
        made.with_disk(read_bytes_per_s=80e6, cached_fraction=1.0),
        made.with_builds(*made.BUILDS, dataclasses.replace(made.BUILDS[1], gpu_devices=())),  # one of two is enough
        made.with_device(fabric_state=1),  # and yet CUDA computes
        made.with_environment(device_nodes={"nvidia0": "ok", "nvidia-uvm": "missing"}),  # made when CUDA started
    ]
    assert [findings(evidence) for evidence in healthy] == [()] * len(healthy)


def test_worst_findings_come_first() -> None:
    evidence = dataclasses.replace(made.with_device(persistence_enabled=False, pcie_width=8), functional=None)
    evidence = dataclasses.replace(evidence, lost_cards=("card 2: GPU is lost",))
    severities = [finding.severity for finding in findings(evidence)]
    assert severities == [Severity.ERROR, Severity.WARNING, Severity.NOTE, Severity.NOTE]


def test_flag_that_turns_direct_copies_off_is_named_only_on_proof() -> None:
    proven = [made.with_pair(direct=True, outcome=Outcome.WRONG), broken_reduce(Outcome.OK)]
    unproven = [broken_reduce(Outcome.HUNG), made.with_pair(direct=False, outcome=Outcome.WRONG), slow_reduce(8, 1.0)]
    assert all("NCCL_P2P_DISABLE" in findings(evidence)[0].fix for evidence in proven)
    assert not any("NCCL_P2P_DISABLE" in findings(evidence)[0].fix for evidence in unproven)


def test_engine_without_gpu_is_an_error_only_where_the_file_uses_it() -> None:
    evidence = made.with_builds(dataclasses.replace(made.BUILDS[1], gpu_devices=()))
    used = dataclasses.replace(evidence, wanted=Wanted(engines=frozenset({"llamacpp"})))
    assert findings(evidence)[0].severity is Severity.WARNING
    assert findings(used)[0].severity is Severity.ERROR


def test_disk_too_slow_for_the_start_deadline_is_an_error() -> None:
    slow, too_slow = made.with_disk(read_bytes_per_s=80e6), made.with_disk(read_bytes_per_s=20e6)
    assert [findings(evidence)[0].severity for evidence in (slow, too_slow)] == [Severity.WARNING, Severity.ERROR]


def test_prebuilt_llama_cpp_on_a_processor_with_amx_is_noted_where_there_are_no_cards() -> None:
    wheel = dataclasses.replace(made.BUILDS[1], gpu_devices=())
    with_amx = dataclasses.replace(no_cards(), builds=(wheel,))
    plain = dataclasses.replace(made.HOST, instruction_sets=("avx2",))
    without = dataclasses.replace(with_amx, machine=dataclasses.replace(with_amx.machine, host=plain))
    assert [finding.code for finding in findings(with_amx)] == ["no_cards", "build_without_amx"]
    assert [finding.code for finding in findings(without)] == ["no_cards"]


def test_unlike_cards_in_cuda_s_own_order_are_told_that_indices_differ() -> None:
    assert [finding.code for finding in findings(unlike_cards())] == ["device_order", "cards_unequal"]


def test_cards_in_exclusive_mode_hide_the_context_s_cost_and_are_no_failure() -> None:
    """They refuse the second process; the copies were made by the first."""
    assert findings(made.with_functional(context_bytes=None)) == ()
    hung = made.with_pair(direct=True, outcome=Outcome.HUNG).functional
    assert hung is not None
    broken = dataclasses.replace(hung, context_bytes=None, peer_detail="no answer within 15 s")
    codes = [finding.code for finding in findings(dataclasses.replace(sound(), functional=broken))]
    assert codes == ["peer_direct_broken"]


def test_every_fault_of_the_visible_devices_has_its_words() -> None:
    assert set(rules_environment._VISIBLE_FAULTS) == set(Fault)


OPTIONAL = sorted(set(nvml_record()["devices"][0]) - {"name", "memory", "mig_devices", "nvlinks", "processes"})


@pytest.mark.parametrize("reading", OPTIONAL)
def test_card_that_does_not_tell_one_reading_is_no_fault(reading: str) -> None:
    found = findings(made.with_device(**{reading: None}))
    assert found == ()
