"""A replica on trial gets its share of the turns, never more, and everything when nobody else is there."""

import asyncio
from dataclasses import replace

import pytest

from llamarack.gateway.routing import of_this_turn
from tests.gateway.test_admission import admission, replica, turns

ROWS = [replica("a"), replica("b"), replica("new")]


def _turns(share: float, turns: range, *, full: str = "", gone: str = "") -> list[set[str]]:
    """Who may be chosen, by turn."""
    rows = [replace(row, share=share if row.id == "new" else None) for row in ROWS if row.id not in gone.split()]
    free = [row for row in rows if row.id not in full.split()]
    return [{row.id for row in of_this_turn(free, rows, turn)} for turn in turns]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_share_is_met_also_where_other_models_take_turns(share: float, step: int) -> None:
    chosen = _turns(share, range(0, 3000 * step, step))
    assert chosen.count({"new"}) / len(chosen) == pytest.approx(share, abs=0.01)
    assert chosen.count({"new"}) + chosen.count({"a", "b"}) == len(chosen)


def test_full_replicas_do_not_spill_over_to_the_one_on_trial() -> None:
    assert _turns(0.1, range(1000), full="a b").count(set()) == pytest.approx(900, abs=10)


def test_full_trial_leaves_its_turns_to_the_others() -> None:
    assert _turns(0.5, range(100), full="new") == [{"a", "b"}] * 100


def test_trial_takes_all_when_nobody_else_is_left() -> None:
    assert _turns(0.1, range(100), gone="a b") == [{"new"}] * 100


def test_without_a_trial_everybody_takes_every_turn() -> None:
    assert len(of_this_turn(ROWS, ROWS, 7)) == 3


async def test_admission_keeps_to_the_share_and_lets_the_rest_wait() -> None:
    desk = admission(replica("a", slots=2), replace(replica("new", slots=2), share=0.25))
    went = []
    for _ in range(400):
        reservation = await desk.take("m")
        went.append(reservation.id)
        desk.give(reservation)
    assert went.count("new") == pytest.approx(100, abs=4)
    held = [await desk.take("m") for _ in range(2)]
    while "a" not in desk.in_flight or desk.in_flight["a"] < 2:  # until all that is free is the one on trial
        held.append(await asyncio.wait_for(desk.take("m"), 30))
    waiting = [asyncio.ensure_future(desk.take("m")) for _ in range(3)]
    await turns()
    assert sum(each.done() for each in waiting) <= 1  # one turn may be its own
    assert not desk._lines["m"].for_tokens
    for each in held:
        desk.give(each)
    for each in await asyncio.wait_for(asyncio.gather(*waiting[:2]), 30):
        desk.give(each)
    desk.give(await asyncio.wait_for(waiting[2], 30))
    assert desk.in_flight == {}
