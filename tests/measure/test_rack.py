"""What a rack's status says of memory, and what becomes of it."""

from typing import Any

import pytest

from llamarack.measure.rack import fullest_card_fraction, memory_reading, memory_series
from tests.plan.shapes import card


def _record(used: int | None, resident: int | None) -> dict[str, Any]:
    card = {"name": "NVIDIA H200", "memory_total_bytes": 1000}
    return {
        "models": [
            {
                "name": "m",
                "replicas": [
                    {"id": "m-0", "cards": ["GPU-a"], "actual": {"resident_bytes": 7}},
                    {"id": "m-1", "cards": [], "actual": {"resident_bytes": resident}},
                ],
            }
        ],
        "cards": [
            {"index": 0, "uuid": "GPU-a", "memory_used_bytes": used, **card},
            {"index": 1, "uuid": "GPU-b", "memory_used_bytes": 999, **card},
        ],
    }


def test_cards_and_replicas_without_cards_are_read() -> None:
    reading = memory_reading(_record(400, 50), 9)
    assert reading.used_bytes == {
        "card 0 (NVIDIA H200)": 400,
        "card 1 (NVIDIA H200)": 999,
        "m-1, host memory": 50,  # that of a replica on cards lies on the cards
    }
    assert reading.total_bytes == {"card 0 (NVIDIA H200)": 1000, "card 1 (NVIDIA H200)": 1000}


def test_status_without_cards_gives_what_it_has() -> None:
    record = _record(None, None)
    del record["cards"]
    assert memory_reading(record, 9).used_bytes == {}
    assert fullest_card_fraction(record, []) is None


def test_series_leave_out_what_was_not_known_at_a_time() -> None:
    readings = [memory_reading(_record(used, 50 + at), at) for at, used in ((1, 400), (2, None), (3, 500))]
    series = {each.name: each for each in memory_series(readings)}
    card, replica = series["card 0 (NVIDIA H200)"], series["m-1, host memory"]
    assert (card.at_monotonic_ns, card.used_bytes, card.total_bytes) == ((1, 3), (400, 500), 1000)
    assert (replica.used_bytes, replica.total_bytes) == ((51, 52, 53), None)


def test_fullest_card_is_one_of_the_racks_own() -> None:
    cards = [card(0, "NVIDIA H200", 1000, free_mib=600), card(1, "NVIDIA H200", 1000, free_mib=1)]
    record = _record(None, None)
    record["models"][0]["replicas"][0]["cards"] = ["GPU-0"]
    assert fullest_card_fraction(record, cards) == pytest.approx(0.4)  # card 1 is fuller and somebody else's
    record["models"][0]["replicas"][0]["cards"] = ["GPU-0", "GPU-1"]
    assert fullest_card_fraction(record, cards) == pytest.approx(0.999)
