from llamarack.hardware.cards import cards_of, cuda_version
from llamarack.hardware.machine import LinkKind
from llamarack.units import MIB
from tests.hardware.recorded import changed, nvml_record


def test_h200_record_gives_the_readings_in_the_units_of_the_record() -> None:
    first, second = cards_of(nvml_record())
    assert (first.index, second.index) == (0, 1)
    assert first.memory_total_bytes == 143_771 * MIB
    assert first.memory_free_bytes == 150_109_880_320
    assert first.compute_capability == (9, 0)
    assert first.power_limit_watts == 700
    assert first.throttle_reasons == ()  # idle is not throttling
    assert cuda_version(nvml_record()) == "13.0"


def test_h200_bandwidth_is_near_the_data_sheet() -> None:
    bandwidth = cards_of(nvml_record())[0].memory_bandwidth_bytes_per_s
    assert bandwidth is not None
    assert abs(bandwidth / 4.8e12 - 1) < 0.03  # NVIDIA H200 data sheet: 4.8 TB/s


def test_switched_nvlinks_count_as_lanes_to_every_card() -> None:
    (link,) = cards_of(nvml_record())[0].links
    assert (link.kind, link.lanes, link.generation, link.peer_index) == (LinkKind.NVLINK, 18, 4, 1)
    assert link.bandwidth_bytes_per_s == 450e9  # data sheet: 900 GB/s, both directions
    assert link.peer_to_peer is True


def test_direct_nvlinks_count_only_to_the_card_at_the_far_end() -> None:
    def bridge(record: dict) -> None:
        for device, peer in zip(record["devices"], reversed(record["devices"]), strict=True):
            for link in device["nvlinks"]:
                link["remote_type"] = 0
                link["remote_pci_bus_id"] = peer["pci_bus_id"] if link["link"] < 4 else "00000000:99:00.0"

    (link,) = cards_of(changed(nvml_record(), bridge))[0].links
    assert link.lanes == 4


def test_cards_without_nvlink_are_linked_by_the_slower_pcie_end() -> None:
    def pcie(record: dict) -> None:
        for device in record["devices"]:
            device["nvlinks"] = []
        record["devices"][1]["pcie_width_max"] = 8
        for pair in record["pairs"]:
            pair |= {"ancestor": 50, "p2p_nvlink": 5, "p2p_read": 1}

    (link,) = cards_of(changed(nvml_record(), pcie))[0].links
    assert link.kind is LinkKind.CROSS_SOCKET
    assert link.bandwidth_bytes_per_s == 8 * 3.938e9
    assert link.peer_to_peer is False


def test_mig_slices_replace_their_card_and_have_their_own_memory() -> None:
    def slice_it(record: dict) -> None:
        memory = {"total": 16_384 * MIB, "reserved": 0, "free": 16_000 * MIB, "used": 384 * MIB}
        parts = [{"uuid": f"MIG-{n}", "name": "NVIDIA H200 MIG 1g.18gb", "memory": memory} for n in range(2)]
        record["devices"][0] |= {"mig_enabled": True, "mig_devices": [part | {"processes": []} for part in parts]}

    record = changed(nvml_record(), slice_it)
    cards = cards_of(record)
    assert [card.uuid for card in cards] == ["MIG-0", "MIG-1", record["devices"][1]["uuid"]]
    assert [card.index for card in cards] == [0, 1, 2]
    assert cards[0].memory_total_bytes == 16_384 * MIB
    assert cards[0].mig_parent_uuid == record["devices"][0]["uuid"]
    assert cards[0].memory_bandwidth_bytes_per_s is None  # a slice has a share that NVML does not tell
    assert all(card.links == () for card in cards)


def test_card_that_reports_nothing_optional_has_unknowns_not_zeros() -> None:
    def poor(record: dict) -> None:
        keep = {"uuid", "name", "memory", "mig_devices", "nvlinks", "processes"}
        for key in set(record["devices"][0]) - keep:
            record["devices"][0][key] = None
        record["devices"][0]["nvlinks"] = []

    card = cards_of(changed(nvml_record(), poor))[0]
    assert card.power_limit_watts is None
    assert card.compute_capability is None
    assert card.utilization_fraction is None
    assert card.ecc_enabled is None


def test_passed_through_cards_have_nvlinks_and_no_numa_node() -> None:
    first, second = cards_of(nvml_record())
    assert (first.name, first.numa_node, first.memory_total_bytes) == ("NVIDIA H200", None, 143_771 * MIB)
    assert [(link.peer_index, link.kind, link.lanes) for link in first.links] == [(1, LinkKind.NVLINK, 18)]
    assert [(link.peer_index, link.kind, link.lanes) for link in second.links] == [(0, LinkKind.NVLINK, 18)]
