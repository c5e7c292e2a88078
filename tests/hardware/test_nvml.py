"""The reader with the real `pynvml` over a stand-in of NVIDIA's library."""

import ast
import inspect
from types import ModuleType

import pynvml
import pytest

from llamarack.errors import HardwareError
from llamarack.hardware import detect, nvml, telemetry
from llamarack.hardware.machine import LinkKind
from llamarack.units import GIB

pytestmark = pytest.mark.process


def test_readings_the_library_lacks_or_refuses_are_unknown(order: pytest.MonkeyPatch) -> None:
    machine = detect.detect_machine()
    first, second = machine.cards
    assert (machine.driver_version, machine.cuda_version) == ("580.159", "13.0")
    assert (first.uuid, second.uuid) == ("GPU-1", "GPU-2")
    assert (first.memory_total_bytes, second.memory_free_bytes) == (24 * GIB, 22 * GIB - GIB // 4)
    assert (first.persistence_enabled, second.persistence_enabled) == (True, False)
    assert first.ecc_enabled is None
    assert first.compute_capability is None
    (link,) = first.links
    assert (link.kind, link.peer_to_peer, link.bandwidth_bytes_per_s) == (LinkKind.PCIE_HOST, True, None)


def test_card_that_cannot_be_opened_is_lost_and_the_others_stay(order: pytest.MonkeyPatch) -> None:
    order.setenv("FAKE_NVML", "lost")
    record = detect.read_nvml()
    assert record["lost"] == ["card 1: GPU is lost"]
    assert [card.uuid for card in detect.machine_of(record).cards] == ["GPU-1"]


def test_library_of_another_version_than_the_driver_is_a_failure(order: pytest.MonkeyPatch) -> None:
    order.setenv("FAKE_NVML", "mismatch")
    with pytest.raises(HardwareError, match="version mismatch"):
        detect.detect_machine()


def test_library_without_a_driver_is_a_machine_without_cards(order: pytest.MonkeyPatch) -> None:
    order.setenv("FAKE_NVML", "no_driver")
    assert detect.detect_machine().cards == ()


def test_library_that_blocks_is_left_at_the_deadline(order: pytest.MonkeyPatch) -> None:
    order.setenv("FAKE_NVML", "hang")
    assert detect.read_nvml(deadline_s=1)["status"] == "hung"
    with pytest.raises(HardwareError, match="did not answer within 1 s") as raised:
        detect.detect_machine(deadline_s=1)
    assert "dmesg" in str(raised.value.hint)


@pytest.mark.parametrize(("module", "fewest"), [(nvml, 30), (telemetry, 15)])
def test_every_name_asked_of_pynvml_exists(module: ModuleType, fewest: int) -> None:
    """A misspelt one would only be met on a machine with a card."""
    tree = ast.parse(inspect.getsource(module))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "pynvml"}
    assert len(names) > fewest
    assert [name for name in names if not hasattr(pynvml, name)] == []
