"""A load is judged by whether it moves, gets its time by size, and its slowness is explained."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarack.hardware.machine import Host
from llamarack.supervise.admin import ask
from llamarack.supervise.loading import Load, LoadState, moved, slow_causes
from llamarack.supervise.state import State
from llamarack.units import GIB, MIB
from tests import fake_rack
from tests.supervise.conftest import RunningRack, left_of

GOOD_HOST = Host(
    processor="x",
    cores_usable=32,
    instruction_sets=(),
    memory_total_bytes=64 * GIB,
    memory_available_bytes=60 * GIB,
)


def _load(deadline_s: float = 100, *, may_extend: bool = True) -> Load:
    return Load(now_monotonic_s=0, deadline_s=deadline_s, may_extend=may_extend, weights_bytes=10 * GIB)


def _state(at: float, **more: Any) -> LoadState:
    return LoadState(at_monotonic_s=at, log_bytes=10, **more)


@pytest.mark.parametrize(
    "more",
    [{"fraction": 0.5}, {"resident_bytes": 5 * GIB}, {"read_bytes": 2 * MIB}, {"processor_s": 1.0}],
)
def test_anything_that_grows_is_movement(more: dict[str, Any]) -> None:
    assert moved(_state(0), _state(1, **more))
    assert not moved(_state(0, **more), _state(1, **more))


def test_load_that_moves_gets_up_to_three_times_its_deadline() -> None:
    load = _load()
    load.take(_state(95, read_bytes=GIB))
    assert not load.is_over(120)
    load.take(_state(290, read_bytes=2 * GIB))
    assert not load.is_over(299)
    assert load.is_over(300)


def test_load_that_stands_still_ends_at_its_deadline() -> None:
    load = _load()
    load.take(_state(30, read_bytes=GIB))
    assert load.is_over(100)


def test_deadline_that_was_set_by_hand_is_kept() -> None:
    load = _load(may_extend=False)
    load.take(_state(99, read_bytes=GIB))
    assert load.is_over(100)


def _causes(load: Load, now: float, file_system: str = "ext4", host: Host = GOOD_HOST) -> str:
    return "; ".join(slow_causes(load, now, file_system=file_system, host=host))


def test_causes_are_named() -> None:
    load = _load()
    load.take(_state(50, read_bytes=5 * GIB, processor_s=9))
    assert "a cold cache: 5.0 GiB came from the disk at" in _causes(load, 50)
    assert "network file system (nfs4)" in _causes(load, 50, "nfs4")
    assert "only 4 processor cores" in _causes(load, 50, host=replace(GOOD_HOST, cores_usable=4))
    assert "memory is not free: 1.0 GiB of 64.0 GiB" in _causes(
        load, 50, host=replace(GOOD_HOST, memory_available_bytes=GIB)
    )


def test_load_without_output_is_told_as_such() -> None:
    assert "no output, no processor time and no memory for 70 s" in _causes(_load(), 70)


def test_load_from_a_warm_cache_on_a_good_host_has_no_excuse() -> None:
    load = _load()
    load.take(_state(50, processor_s=9))
    assert _causes(load, 50) == ""


@pytest.mark.process
@pytest.mark.fault(
    "slow load",
    "told at half of its deadline with what is seen: network disk, cold cache, few cores, memory",
)
async def test_slow_load_is_told_with_its_causes_and_shown_with_its_progress(tmp_path: Path) -> None:
    supervisor = fake_rack.build(tmp_path, [{"load_s": 3, "start_deadline_s": 4.0}])
    rack = RunningRack(supervisor)
    await rack.start()
    try:
        await rack.until(lambda: supervisor.replicas[0].state is State.LOADING)
        row = (await ask(supervisor.paths, {"op": "status"}))["models"][0]["replicas"][0]
        assert row["loading"]["deadline_s"] == 4.0
        assert 0 <= row["loading"]["seconds"] < 40
        await rack.until(lambda: "start_slow" in rack.kinds())
        told = next(entry for entry in supervisor.journal.recent if entry.kind == "start_slow")
        assert told.message.startswith("loading for 2.")
        await rack.until_ready()
        row = (await ask(supervisor.paths, {"op": "status"}))["models"][0]["replicas"][0]
        assert row["loading"] is None
    finally:
        await rack.stop()
    assert not left_of(tmp_path)


@pytest.mark.process
@pytest.mark.fault("load that takes longer than its size says, but moves", "gets up to three times as long")
async def test_load_that_moves_outlives_its_deadline_and_becomes_ready(tmp_path: Path) -> None:
    supervisor = fake_rack.build(tmp_path, [{"load_s": 4, "load_busy": True, "start_deadline_s": 2.0}])
    supervisor._specs[0] = replace(supervisor._specs[0], is_deadline_auto=True)
    rack = RunningRack(supervisor)
    await rack.start()
    try:
        started = time.monotonic()
        await rack.until_ready()
        assert time.monotonic() - started > 2.0
        assert "start_failed" not in rack.kinds()
    finally:
        await rack.stop()


@pytest.mark.process
@pytest.mark.fault("load without output, processor time or memory", "ended at its deadline, and told as that")
async def test_load_that_stands_still_is_ended_and_told_as_that(tmp_path: Path) -> None:
    rack = RunningRack(fake_rack.build(tmp_path, [{"load_s": 60, "start_deadline_s": 6.0}], restarts={"max": 0}))
    await rack.start()
    try:
        (replica,) = rack.supervisor.replicas
        await rack.until(lambda: replica.state is State.LOADING)
        assert replica.child is not None
        assert replica.child.pid is not None
        os.kill(replica.child.pid, signal.SIGSTOP)
        await rack.until(lambda: "start_failed" in rack.kinds())
        assert replica.last_death is not None
        assert "not ready within 6.00 s: no output, no processor time and no memory for" in replica.last_death.message
    finally:
        await rack.stop()
    assert not [line for line in left_of(tmp_path) if "rack.sock" not in line]
