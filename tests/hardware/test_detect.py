import json
import sys
from pathlib import Path

import pytest

from llamarack.hardware import detect
from llamarack.hardware.pci import read_pci_cards
from llamarack.hardware.probe import Answer, Status
from tests.hardware.recorded import nvml_record, write_tree


@pytest.mark.process
def test_nvml_child_that_dies_is_a_failure_with_its_last_words() -> None:
    record = detect.read_nvml([sys.executable, "-c", "raise SystemExit('driver/library version mismatch')"])
    assert (record["status"], record["detail"]) == ("failed", "driver/library version mismatch")


def test_no_child_is_asked_where_the_library_is_surely_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    monkeypatch.setattr(detect, "ask", lambda *_, **__: Answer(status=Status.OK, values={"status": "asked"}))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert detect.machine_of(detect.read_nvml()).cards == ()
    assert detect.read_nvml()["status"] == "absent"
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/driver")  # a child would look there
    assert detect.read_nvml()["status"] == "asked"


@pytest.mark.process
def test_machine_from_a_record_has_cards_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(nvml_record()))
    machine = detect.machine_of(detect.read_nvml(["cat", str(path)]))
    assert (len(machine.cards), machine.driver_version, machine.cuda_version) == (2, "580.159.04", "13.0")


@pytest.mark.process
def test_record_without_library_is_a_machine_without_cards() -> None:
    record = detect.read_nvml([sys.executable, "-c", 'print(\'{"status": "absent", "devices": [], "pairs": []}\')'])
    assert detect.machine_of(record).cards == ()


def test_pci_scan_finds_compute_cards_of_any_maker_and_no_others(tmp_path: Path) -> None:
    devices = {
        "0000:03:00.0": ("0x1002", "0x038000", "0x74a1"),  # AMD accelerator
        "0000:1b:00.0": ("0x10de", "0x030200", "0x2335"),
        "0000:02:00.0": ("0x1a03", "0x030000", "0x2000"),  # the server's own display chip
        "0000:00:1f.0": ("0x8086", "0x060100", "0x1b81"),  # Intel, but a bridge
    }
    tree = {
        f"sys/bus/pci/devices/{slot}/{name}": value + "\n"
        for slot, values in devices.items()
        for name, value in zip(("vendor", "class", "device"), values, strict=True)
    }
    found = read_pci_cards(write_tree(tmp_path, tree))
    assert [(card.pci_bus_id, card.vendor) for card in found] == [("0000:03:00.0", "amd"), ("0000:1b:00.0", "nvidia")]
