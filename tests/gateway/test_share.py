"""A replica on trial gets its share of the turns, never more, and everything when nobody else is there."""

from dataclasses import replace

import pytest

from llamarack.gateway.routing import choose
from tests.gateway.test_admission import replica


def _chosen(share: float, turns: range, in_flight: dict[str, int], excluded: tuple[str, ...] = ()) -> list[str | None]:
    rows = [replica("a"), replica("b"), replace(replica("new"), share=share)]
    found = [choose(rows, in_flight, excluded=excluded, turn=turn) for turn in turns]
    return [row.id if row else None for row in found]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_share_is_met_also_where_other_models_take_turns(share: float, step: int) -> None:
    chosen = _chosen(share, range(0, 3000 * step, step), {})
    assert chosen.count("new") / len(chosen) == pytest.approx(share, abs=0.01)
    assert {"a", "b"} < set(chosen)


def test_full_replicas_do_not_spill_over_to_the_one_on_trial() -> None:
    chosen = _chosen(0.1, range(1000), {"a": 100, "b": 100})
    assert chosen.count(None) == pytest.approx(900, abs=10)


def test_full_trial_leaves_its_turns_to_the_others() -> None:
    assert "new" not in _chosen(0.5, range(100), {"new": 100})


def test_trial_takes_all_when_nobody_else_is_left() -> None:
    rows = [replica("a"), replica("b")]
    keys = tuple(row.endpoint.key for row in rows if row.endpoint)
    assert set(_chosen(0.1, range(100), {}, excluded=keys)) == {"new"}
