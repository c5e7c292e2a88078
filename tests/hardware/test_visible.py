import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.hardware.machine import Card
from llamarack.hardware.visible import Fault, Visible, visible_cards
from llamarack.units import GIB


def card(index: int, uuid: str, parent: str | None = None) -> Card:
    return Card(
        index=index,
        uuid=uuid,
        vendor="nvidia",
        name="GPU",
        memory_total_bytes=24 * GIB,
        memory_free_bytes=24 * GIB,
        mig_parent_uuid=parent,
    )


WHOLE = [card(0, "GPU-aa01"), card(1, "GPU-ab02"), card(2, "GPU-cc03")]
SLICED = [card(0, "MIG-1", "GPU-aa01"), card(1, "MIG-2", "GPU-aa01"), card(2, "GPU-cc03")]


@pytest.mark.parametrize(
    ("value", "shown", "fault"),
    [
        (None, [0, 1, 2], None),
        ("2,0", [2, 0], None),
        (" 1 , 2 ", [1, 2], None),
        ("GPU-cc03,GPU-aa", [2, 0], None),
        ("", [], Fault.EMPTY),
        ("  ", [], Fault.EMPTY),
        ("-1", [], Fault.NONE),
        ("0,3,1", [0], Fault.OUT_OF_RANGE),
        ("0,-1,1", [0], Fault.OUT_OF_RANGE),
        ("0,1,0", [], Fault.TWICE),
        ("GPU-aa,GPU-aa01", [], Fault.TWICE),
        ("GPU-zz", [], Fault.UNKNOWN_UUID),
        ("GPU-a", [], Fault.AMBIGUOUS_UUID),
        ("all", [], Fault.NOT_A_CARD),
        ("0;1", [], Fault.NOT_A_CARD),
        ("0,", [0], Fault.NOT_A_CARD),
        ("0,GPU-cc03", [0, 2], Fault.MIXED),
    ],
)
def test_visible_cards_are_those_cuda_shows(value: str | None, shown: list[int], fault: Fault | None) -> None:
    visible = visible_cards(value, WHOLE)
    assert ([card.index for card in visible.cards], visible.fault) == (shown, fault)


@pytest.mark.parametrize(
    ("value", "shown", "fault"),
    [
        ("MIG-2", [1], None),
        ("MIG-1,MIG-2", [0], Fault.SEVERAL_SLICES),
        ("0", [], Fault.MIG_BY_INDEX),
        ("1", [2], None),  # the second whole card
        ("2", [], Fault.OUT_OF_RANGE),
    ],
)
def test_mig_slices_are_named_by_uuid_and_shown_one_at_a_time(
    value: str, shown: list[int], fault: Fault | None
) -> None:
    visible = visible_cards(value, SLICED)
    assert ([card.index for card in visible.cards], visible.fault) == (shown, fault)


@given(st.text(alphabet="012-,GPUMIGabc ", max_size=20))
def test_any_text_chooses_cards_once_each_and_an_unfaulty_one_at_least_one(value: str) -> None:
    visible = visible_cards(value, WHOLE)
    assert len(set(visible.cards)) == len(visible.cards)
    assert set(visible.cards) <= set(WHOLE)
    assert visible.cards or visible.fault is not None


@given(st.permutations(WHOLE), st.integers(1, 3))
def test_distinct_indices_are_shown_in_the_order_written(order: list[Card], count: int) -> None:
    chosen = order[:count]
    for written in (",".join(str(one.index) for one in chosen), ",".join(str(one.uuid) for one in chosen)):
        assert visible_cards(written, WHOLE) == Visible(cards=tuple(chosen))
