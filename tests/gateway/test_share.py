"""A replica on trial gets its share of the turns, never more, and everything when nobody else is there."""

from dataclasses import replace

import pytest

from llamarack.gateway.routing import of_this_turn
from tests.gateway.test_admission import replica

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
