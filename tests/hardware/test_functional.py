import sys
import time
from pathlib import Path

import pytest

from llamarack.hardware import functional
from llamarack.hardware.functional import Outcome, bus_rate, collective_of, pair_results, run_functional
from llamarack.hardware.probe import Events, Probe, Status
from llamarack.units import KIB, MIB
from tests.hardware.sound import sound

CARDS = sound().machine.cards


def run(deadline_s: float = 30) -> functional.Functional:
    return run_functional(CARDS, None, ends_monotonic_s=time.monotonic() + deadline_s)


def outcomes(result: functional.Functional, *, direct: bool) -> dict[tuple[int, int], Outcome]:
    return {(pair.source_index, pair.target_index): pair.outcome for pair in result.pairs if pair.direct is direct}


@pytest.mark.process
def test_sound_cards_pass_every_copy_and_tell_what_a_context_costs(order: pytest.MonkeyPatch) -> None:
    result = run()
    assert outcomes(result, direct=False) == outcomes(result, direct=True) == {(0, 1): Outcome.OK, (1, 0): Outcome.OK}
    assert result.context_bytes == {0: 100 * MIB, 1: 200 * MIB}
    assert result.peer_detail is None
    assert all(pair.bandwidth_bytes_per_s for pair in result.pairs)


@pytest.mark.process
def test_direct_copy_that_loses_data_is_wrong_and_only_that_one(order: pytest.MonkeyPatch) -> None:
    order.setenv("FAKE_CUDA", "wrong")
    result = run()
    assert outcomes(result, direct=True) == {(0, 1): Outcome.WRONG, (1, 0): Outcome.OK}
    assert set(outcomes(result, direct=False).values()) == {Outcome.OK}


@pytest.mark.process
def test_copy_through_the_host_that_loses_data_is_wrong(order: pytest.MonkeyPatch) -> None:
    order.setenv("FAKE_CUDA", "staged")
    assert outcomes(run(), direct=False) == {(0, 1): Outcome.WRONG, (1, 0): Outcome.OK}


@pytest.mark.process
def test_copy_that_never_ends_is_killed_and_its_pair_named(order: pytest.MonkeyPatch) -> None:
    order.setenv("FAKE_CUDA", "hang")
    result = run(deadline_s=5)
    assert outcomes(result, direct=True) == {(0, 1): Outcome.HUNG}
    assert set(outcomes(result, direct=False).values()) == {Outcome.OK}
    assert result.context_bytes is not None


@pytest.mark.process
def test_pairs_without_peer_access_have_no_direct_copy(order: pytest.MonkeyPatch) -> None:
    order.setenv("FAKE_CUDA", "no_access")
    result = run()
    assert outcomes(result, direct=True) == {}
    assert len(result.pairs) == 2


@pytest.mark.process
def test_driver_that_refuses_to_start_says_why(order: pytest.MonkeyPatch) -> None:
    order.setenv("FAKE_CUDA", "802")
    result = run()
    assert result.context_bytes is None
    assert "CUDA_ERROR_SYSTEM_NOT_READY" in str(result.peer_detail)


def reduce_event(rank: int, size_bytes: int, seconds: float, correct: bool = True) -> dict[str, object]:
    return {"event": "reduce", "rank": rank, "size_bytes": size_bytes, "seconds": seconds, "correct": correct}


MATRIX: dict[str, object] = {"event": "matrix", "rank": 0, "correct": True}
DONE: dict[str, object] = {"event": "done"}


def collective(status: Status, *events: dict[str, object]) -> functional.Collective:
    return collective_of(Events(status=status, events=events), "nccl", 2)


def test_all_reduce_takes_as_long_as_its_slowest_rank_and_needs_all_of_them_right() -> None:
    both = (reduce_event(0, 8 * KIB, 1e-5), reduce_event(1, 8 * KIB, 3e-5))
    result = collective(Status.OK, MATRIX, *both, reduce_event(0, MIB, 1e-5), DONE)
    assert [(one.size_bytes, one.seconds) for one in result.reduces] == [(8 * KIB, 3e-5)]
    assert result.outcome is Outcome.OK
    wrong = collective(Status.OK, MATRIX, both[0], reduce_event(1, 8 * KIB, 1e-5, correct=False), DONE)
    assert wrong.outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("status", "events", "outcome"),
    [
        (Status.HUNG, (), Outcome.NOT_REACHED),  # torch was still starting
        (Status.HUNG, (MATRIX,), Outcome.HUNG),
        (Status.FAILED, (MATRIX,), Outcome.FAILED),
        (Status.OK, (MATRIX,), Outcome.FAILED),  # ended well without saying so
    ],
)
def test_outcome_of_an_all_reduce_is_told_by_how_far_it_came(
    status: Status, events: tuple[dict[str, object], ...], outcome: Outcome
) -> None:
    assert collective(status, *events).outcome is outcome


def test_bus_rate_is_that_of_nccl_s_own_tests() -> None:
    """nccl-tests, PERFORMANCE.md: bus bandwidth of an all-reduce = size / time · 2 (n-1)/n."""
    assert bus_rate(functional.ReduceResult(size_bytes=64 * MIB, seconds=251e-6, correct=True), 2) == pytest.approx(
        267.4e9, rel=1e-3
    )
    assert bus_rate(functional.ReduceResult(size_bytes=1000, seconds=1.0, correct=True), 4) == 1500


def test_wrong_matrix_product_is_kept_with_its_rank() -> None:
    result = collective(Status.OK, MATRIX, MATRIX | {"rank": 1, "correct": False}, DONE)
    assert result.matrix_wrong_ranks == (1,)


def test_pair_that_failed_keeps_the_driver_s_words() -> None:
    failed = {"event": "pair", "source": 1, "target": 0, "direct": True, "error": "cuMemcpyPeer: CUDA_ERROR_OTHER"}
    (pair,) = pair_results(Events(status=Status.OK, events=({**failed, "event": "start"}, failed)), CARDS)
    assert (pair.source_index, pair.outcome, pair.detail) == (1, Outcome.FAILED, "cuMemcpyPeer: CUDA_ERROR_OTHER")


# Stands for an interpreter with torch: hangs in the all-reduce unless peer access is turned off.
PICKY = """#!{python}
import os, signal
print('{{"event": "matrix", "rank": 0, "correct": true}}', flush=True)
if os.environ.get("NCCL_P2P_DISABLE") != "1":
    signal.pause()
print('{{"event": "done"}}')
"""


@pytest.mark.process
def test_broken_all_reduce_is_run_again_without_peer_access(
    tmp_path: Path, order: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "COLLECTIVE_DEADLINE_S", 2.0)
    interpreter = tmp_path / "python"
    interpreter.write_text(PICKY.format(python=sys.executable))
    interpreter.chmod(0o755)
    result = run_functional(CARDS, str(interpreter), ends_monotonic_s=time.monotonic() + 30)
    assert result.collective is not None
    assert result.without_p2p is not None
    assert (result.collective.outcome, result.without_p2p.outcome) == (Outcome.HUNG, Outcome.OK)


@pytest.mark.process
def test_nothing_is_started_when_no_time_is_left() -> None:
    result = run_functional((), sys.executable, ends_monotonic_s=time.monotonic() - 1)
    assert result.collective is not None
    assert result.collective.outcome is Outcome.NOT_REACHED


@pytest.mark.process
def test_interpreter_without_torch_fails_with_its_own_words() -> None:
    result = run_functional((), sys.executable, ends_monotonic_s=time.monotonic() + 20)
    assert result.collective is not None
    assert result.collective.outcome is Outcome.FAILED
    assert "torch" in str(result.collective.detail)


@pytest.mark.process
def test_killed_probe_takes_its_children_with_it_and_keeps_what_was_said() -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        'print(\'{"event": "started", "pid": %d}\' % child.pid, flush=True)\n'
        "time.sleep(600)\n"
    )
    ran = Probe([sys.executable, "-c", script], deadline_s=3).events()
    assert ran.status is Status.HUNG
    (started,) = ran.named("started")
    ends = time.monotonic() + 10
    while Path(f"/proc/{started['pid']}").exists() and not is_zombie(started["pid"]):
        assert time.monotonic() < ends, "the grandchild outlived its probe"


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
