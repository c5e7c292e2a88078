"""The streaming test of the host's memory, and that what it found is found again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.hardware.machine import Host
from llamarack.hardware.memory_speed import (
    buffer_bytes,
    measure_read,
    remember_bandwidth,
    with_remembered_bandwidth,
)
from llamarack.units import GIB, MIB

HOST = Host(
    processor="Example 9000",
    cores_usable=2,
    instruction_sets=(),
    memory_total_bytes=16 * GIB,
    memory_available_bytes=8 * GIB,
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMARACK_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def _with_cache(root: Path, size: str) -> Path:
    folder = root / "sys/devices/system/cpu/cpu0/cache/index3"
    folder.mkdir(parents=True)
    (folder / "size").write_text(f"{size}\n")
    return root


def test_buffer_is_larger_than_the_cache_and_leaves_the_machine_its_memory(tmp_path: Path) -> None:
    root = _with_cache(tmp_path, "262144K")
    assert buffer_bytes(HOST, root) == 1024 * MIB
    small = replace(HOST, memory_available_bytes=2400 * MIB)
    assert buffer_bytes(small, root) == 600 * MIB
    assert buffer_bytes(replace(HOST, memory_available_bytes=GIB), root) is None  # the cache would be measured
    assert buffer_bytes(HOST, tmp_path / "nothing") == 512 * MIB


@pytest.mark.process
def test_reading_gives_a_rate_that_memory_can_have() -> None:
    assert 1e8 < measure_read(2, 64 * MIB, seconds=0.0) < 1e13


def test_rate_is_remembered_for_this_processor_and_these_cores_alone(state: Path) -> None:
    assert with_remembered_bandwidth(HOST) == HOST
    remember_bandwidth(HOST, 25e9)
    assert with_remembered_bandwidth(HOST).memory_bandwidth_bytes_per_s == 25e9
    for other in (replace(HOST, processor="Example 9001"), replace(HOST, cores_usable=4)):
        assert with_remembered_bandwidth(other) == other


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"memory_bandwidth_bytes_per_s": -1}'])
def test_damaged_memory_is_no_memory(state: Path, text: str) -> None:
    remember_bandwidth(HOST, 25e9)
    (path,) = state.iterdir()
    if text.startswith('{"'):
        text = json.dumps({**json.loads(path.read_text()), **json.loads(text)})
    path.write_text(text)
    assert with_remembered_bandwidth(HOST) == HOST


def test_folder_that_cannot_be_written_costs_only_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMARACK_STATE_DIR", "/proc/nowhere")
    remember_bandwidth(HOST, 25e9)
    assert with_remembered_bandwidth(HOST) == HOST
