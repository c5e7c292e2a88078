"""A group with an idle card never gets traffic: the arithmetic, and real starts of the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.errors import HardwareError, NeverReady
from llamarack.plan.record import CardPlan, Terms
from llamarack.supervise import card_memory, card_return
from llamarack.supervise.card_share import held_bytes, require_shares
from llamarack.supervise.supervisor import Supervisor
from llamarack.units import GIB, MIB
from tests import fake_rack
from tests.fake_adaptor import fake_spec
from tests.supervise.conftest import RunningRack, left_of

# Two H200 by NVML: free before a start, and what a LLaMA-2-7B on vLLM 0.25.1 left free on one of them.
_FREE_BYTES = 143_157 * MIB
_USED_BYTES = 132_605 * MIB


def _card(index: int, *, weights_bytes: int = 13 * GIB, total_bytes: int = _USED_BYTES) -> CardPlan:
    return CardPlan(
        index=index,
        name="NVIDIA H200",
        uuid=f"GPU-{index}",
        memory_total_bytes=143_771 * MIB,
        memory_free_bytes=_FREE_BYTES,
        terms=Terms(weights_bytes=weights_bytes),
        total_bytes=total_bytes,
        total_high_bytes=total_bytes,
        free_after_bytes=0,
    )


def test_what_became_used_is_the_share_and_unknown_is_left_out() -> None:
    before = {"GPU-0": 10 * GIB, "GPU-1": None, "GPU-2": 4 * GIB, "GPU-3": 4 * GIB}
    after = {"GPU-0": 3 * GIB, "GPU-1": 3 * GIB, "GPU-2": 5 * GIB}
    assert held_bytes(before, after) == {"GPU-0": 7 * GIB, "GPU-2": 0}


def test_an_idle_card_is_named_with_the_others() -> None:
    with pytest.raises(
        NeverReady, match=r"card 1 \(NVIDIA H200\) holds 400\.0 MiB .*card 0 129\.5 GiB in the same group"
    ):
        require_shares([_card(0), _card(1)], {"GPU-0": _USED_BYTES, "GPU-1": 400 * MIB})


def test_cards_planned_alike_must_hold_alike() -> None:
    with pytest.raises(NeverReady, match=r"card 1 holds 60\.0 GiB and card 0"):
        require_shares([_card(0), _card(1)], {"GPU-0": _USED_BYTES, "GPU-1": 60 * GIB})


def test_cards_planned_unlike_may_hold_unlike() -> None:
    cards = [
        _card(0, weights_bytes=30 * GIB, total_bytes=60 * GIB),
        _card(1, weights_bytes=9 * GIB, total_bytes=18 * GIB),
    ]
    require_shares(cards, {"GPU-0": 59 * GIB, "GPU-1": 17 * GIB})


@given(errors=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=8))
def test_a_plan_that_is_off_by_a_tenth_refuses_nobody(errors: list[float]) -> None:
    cards = [_card(index) for index in range(len(errors))]
    require_shares(cards, {f"GPU-{index}": int(_USED_BYTES * error) for index, error in enumerate(errors)})


def test_cards_that_do_not_tell_are_not_judged() -> None:
    require_shares([_card(0), _card(1)], {})


class _RecordedCards(Supervisor):
    """NVML's answers in order; the last one stays."""

    answers: list[dict[str, int | None]]
    fault: str | None = None

    async def card_free_bytes(self) -> Mapping[str, int | None]:
        if self.fault == "lost":
            raise HardwareError("NVIDIA's driver answers: GPU is lost")
        if self.fault == "stalls":
            await asyncio.sleep(3600)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def _rack(folder: Path, free_after: dict[str, int | None]) -> RunningRack:
    folder.mkdir(parents=True, exist_ok=True)
    spec = fake_spec("fake-0", folder)
    candidate = replace(spec.candidate, cards=(_card(0), _card(1)))
    spec = replace(spec, card_uuids=("GPU-0", "GPU-1"), candidate=candidate)
    plain = fake_rack.build(folder, [{}], restarts={"max": 0, "window_s": 600})
    supervisor = _RecordedCards(plain.deployment, [spec], plain.paths)
    supervisor.answers = [{"GPU-0": _FREE_BYTES, "GPU-1": _FREE_BYTES}, free_after]
    return RunningRack(supervisor)


@pytest.mark.process
async def test_a_start_that_leaves_a_card_empty_is_refused_before_traffic(tmp_path: Path) -> None:
    rack = _rack(tmp_path, {"GPU-0": _FREE_BYTES - _USED_BYTES, "GPU-1": _FREE_BYTES})
    await rack.start()
    try:
        (replica,) = rack.supervisor.replicas
        await rack.until(lambda: "failed" in rack.kinds())
        assert replica.start_seconds is None
        assert replica.last_death is not None
        assert "card 1 (NVIDIA H200) holds 0 B" in replica.last_death.message
        assert "ready" not in rack.kinds()
    finally:
        await rack.stop()


@pytest.mark.process
async def test_a_start_that_fills_both_cards_serves_and_tells_what_they_hold(tmp_path: Path) -> None:
    left = _FREE_BYTES - _USED_BYTES
    rack = _rack(tmp_path, {"GPU-0": left, "GPU-1": left})
    await rack.start()
    try:
        await rack.until_ready()
        assert rack.supervisor.replicas[0].cards.held_bytes == {"GPU-0": _USED_BYTES, "GPU-1": _USED_BYTES}
    finally:
        await rack.stop()


@pytest.mark.process
@pytest.mark.fault(
    "card memory that comes back late after a stop", "waited for before `stopped` is said; told with its bytes if never"
)
@pytest.mark.parametrize("comes_back", [True, False])
async def test_stopped_is_said_once_the_cards_memory_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    left = _FREE_BYTES - _USED_BYTES
    taken: dict[str, int | None] = {"GPU-0": left, "GPU-1": left}
    partly: dict[str, int | None] = {"GPU-0": _FREE_BYTES, "GPU-1": left}
    rack = _rack(tmp_path, taken)
    await rack.start()
    try:
        await rack.until_ready()
        supervisor = rack.supervisor
        assert isinstance(supervisor, _RecordedCards)
        if not comes_back:
            monkeypatch.setattr(card_return, "_TIMEOUT_S", 0.5)
        whole: dict[str, int | None] = {"GPU-0": _FREE_BYTES, "GPU-1": _FREE_BYTES}
        supervisor.answers = [taken, taken, partly, whole if comes_back else partly]
    finally:
        await rack.stop()
    assert len(supervisor.answers) == 1  # looked at until the last of them
    told = [entry for entry in supervisor.journal.recent if entry.kind == "memory_not_back"]
    assert [entry.data["missing_bytes"] for entry in told] == ([] if comes_back else [_USED_BYTES])
    kinds = [entry.kind for entry in supervisor.journal.recent]
    assert "stopped" in kinds
    if not comes_back:
        assert kinds.index("memory_not_back") < kinds.index("stopped")
        assert "GPU-1" in told[0].message


@pytest.mark.process
@pytest.mark.fault("card lost or its driver stalls while an engine is ended", "the engine is ended all the same")
@pytest.mark.parametrize("fault", ["lost", "stalls"])
async def test_driver_that_does_not_answer_keeps_no_engine_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(card_memory, "_LOOK_S", 0.2)
    left = _FREE_BYTES - _USED_BYTES
    rack = _rack(tmp_path, {"GPU-0": left, "GPU-1": left})
    await rack.start()
    try:
        await rack.until_ready()
        assert isinstance(rack.supervisor, _RecordedCards)
        rack.supervisor.fault = fault
    finally:
        await rack.stop()
    assert rack.running is not None
    assert rack.running.exception() is None
    assert rack.kinds().count("stopped") == 1
    assert not left_of(tmp_path)
