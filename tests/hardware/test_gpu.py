"""Every NVML reading against the `nvidia-smi` query that says the same, on a real card."""

import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from llamarack.hardware.cards import cards_of, cuda_version
from llamarack.hardware.detect import read_nvml
from llamarack.hardware.functional import Outcome, run_functional
from llamarack.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi; run `make test-gpu` beside a card"),
]

ENABLED = {True: "Enabled", False: "Disabled"}
# nvidia-smi field -> (our reading as it prints it, allowed difference for numbers that move by themselves)
QUERIES: dict[str, tuple[Callable[[dict[str, Any]], object], float]] = {
    "uuid": (lambda device: device["uuid"], 0),
    "name": (lambda device: device["name"], 0),
    "pci.bus_id": (lambda device: device["pci_bus_id"], 0),
    "compute_cap": (lambda device: ".".join(map(str, device["compute_capability"])), 0),
    "memory.total": (lambda device: device["memory"]["total"] / MIB, 1),
    "memory.reserved": (lambda device: device["memory"]["reserved"] / MIB, 1),
    "memory.free": (lambda device: device["memory"]["free"] / MIB, 64),
    "memory.used": (lambda device: device["memory"]["used"] / MIB, 64),
    "clocks.max.mem": (lambda device: device["memory_clock_max_mhz"], 0),
    "mig.mode.current": (lambda device: ENABLED[device["mig_enabled"]], 0),
    "ecc.mode.current": (lambda device: ENABLED[device["ecc_enabled"]], 0),
    "ecc.errors.uncorrected.volatile.total": (lambda device: device["ecc_uncorrected_volatile"], 0),
    "persistence_mode": (lambda device: ENABLED[device["persistence_enabled"]], 0),
    "enforced.power.limit": (lambda device: device["power_limit_mw"] / 1000, 0.01),
    "power.default_limit": (lambda device: device["power_limit_default_mw"] / 1000, 0.01),
    "temperature.gpu": (lambda device: device["temperature_c"], 5),
    "pcie.link.gen.max": (lambda device: device["pcie_generation_max"], 0),
    "pcie.link.width.max": (lambda device: device["pcie_width_max"], 0),
    "pcie.link.width.current": (lambda device: device["pcie_width"], 0),
}
UNKNOWN = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]")


def smi(*arguments: str) -> list[str]:
    ran = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return read_nvml()


@pytest.mark.parametrize("field", QUERIES)
def test_reading_equals_the_nvidia_smi_field(record: dict[str, Any], field: str) -> None:
    reading, tolerance = QUERIES[field]
    printed = [line.strip() for line in smi(f"--query-gpu={field}", "--format=csv,noheader,nounits")]
    assert len(printed) == len(record["devices"])
    for device, text in zip(record["devices"], printed, strict=True):
        if text in UNKNOWN:
            continue  # old and consumer cards offer less; what is offered must agree
        if isinstance(reading(device), str):
            assert reading(device) == text
        else:
            assert float(str(reading(device))) == pytest.approx(float(text), abs=tolerance)


def test_every_copy_arrives_and_a_context_costs_something(record: dict[str, Any]) -> None:
    """The driver's own overhead per process: 0.2 to 1 GiB on all data-centre cards seen so far."""
    result = run_functional(cards_of(record), None, ends_monotonic_s=time.monotonic() + 60)
    assert result.peer_detail is None
    assert [pair for pair in result.pairs if pair.outcome is not Outcome.OK] == []
    assert result.context_bytes is not None
    assert all(100 * MIB < size < 1024 * MIB for size in result.context_bytes.values())


def test_cards_add_up_together(record: dict[str, Any]) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no torch in this interpreter; run the tests with one that has a CUDA build of it")
    result = run_functional(cards_of(record), sys.executable, ends_monotonic_s=time.monotonic() + 90).collective
    assert result is not None
    assert (result.outcome, result.matrix_wrong_ranks, result.detail) == (Outcome.OK, (), None)
    assert [one.size_bytes for one in result.reduces] == [8 * 1024, 1024**2, 64 * 1024**2]


def test_driver_and_cuda_versions_are_those_of_nvidia_smi(record: dict[str, Any]) -> None:
    assert smi("--query-gpu=driver_version", "--format=csv,noheader")[0] == record["driver_version"]
    assert f"CUDA Version: {cuda_version(record)}" in "\n".join(smi())


def test_active_nvlinks_are_those_of_nvidia_smi(record: dict[str, Any]) -> None:
    printed = [line for line in smi("nvlink", "--status") if "GB/s" in line]
    assert sum(link["active"] for device in record["devices"] for link in device["nvlinks"]) == len(printed)


def test_topology_kinds_are_those_of_the_nvidia_smi_matrix(record: dict[str, Any]) -> None:
    cards = cards_of(record)
    if len(cards) < 2:
        pytest.skip("one card has no pairs; run beside two or more")
    kinds = {"NV": "nvlink", "PI": "pcie_switch", "PX": "pcie_switch", "PH": "pcie_host", "NO": "pcie_host"}
    rows = [line.split() for line in smi("topo", "-m") if line.startswith("GPU")]
    for card in cards:
        for link in card.links:
            cell = rows[card.index][link.peer_index + 1]
            assert link.kind == kinds.get(cell[:2], "cross_socket")
            if cell.startswith("NV"):
                assert link.lanes == int(cell[2:])
