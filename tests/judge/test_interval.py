"""Ratios with intervals, against published tables and by simulation with known truth."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.judge.interval import effect_of, student_t


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.975, 1, 12.706), (0.975, 4, 2.776), (0.995, 9, 3.250), (0.95, 30, 1.697), (0.8, 5, 0.920), (0.975, 1e6, 1.960)],
)
def test_quantiles_of_student_as_in_tables(probability: float, freedom: float, expected: float) -> None:
    assert student_t(probability, freedom) == pytest.approx(expected, abs=6e-4)
    assert student_t(1 - probability, freedom) == pytest.approx(-expected, abs=6e-4)


def effect(base: list[float], new: list[float], *, higher: bool = False, paired: bool = False, checks: int = 1):
    return effect_of(
        base, new, is_higher_better=higher, is_paired=paired, confidence=0.95, checks=checks
    )  # fmt: skip


def test_worse_means_slower_or_less() -> None:
    slower = effect([1.0, 1.01, 0.99], [1.1, 1.11, 1.09])
    less = effect([110.0, 111.0, 109.0], [100.0, 101.0, 99.0], higher=True)
    assert slower is not None
    assert less is not None
    assert slower.worse_fraction == pytest.approx(0.1, abs=1e-3)
    assert less.worse_fraction == pytest.approx(0.1, abs=1e-3)


def test_too_few_or_useless_values_give_nothing() -> None:
    assert effect([1.0, 1.0], [1.0, 1.0, 1.0]) is None
    assert effect([1.0, 0.0, 1.0], [1.0, 1.0, 1.0]) is None


def test_pairs_take_the_machines_mood_out() -> None:
    moods = np.linspace(0.8, 1.2, 6)
    base, new = list(moods), list(moods * 1.05)
    paired, unpaired = effect(base, new, paired=True), effect(base, new)
    assert paired is not None
    assert unpaired is not None
    assert paired.interval.low == pytest.approx(0.05, abs=1e-6)
    assert unpaired.interval.low < 0


@given(
    st.lists(st.floats(0.5, 2), min_size=3, max_size=8), st.lists(st.floats(0.5, 2), min_size=3, max_size=8),
    st.floats(0.1, 10),
)  # fmt: skip
def test_interval_holds_the_effect_and_units_do_not_matter(base: list[float], new: list[float], unit: float) -> None:
    one, scaled = effect(base, new), effect([unit * x for x in base], [unit * x for x in new])
    assert one is not None
    assert scaled is not None
    assert one.interval.low <= one.worse_fraction + 1e-12
    assert one.worse_fraction <= one.interval.high + 1e-12
    assert one.strict_low <= one.interval.low + 1e-9
    assert scaled.worse_fraction == pytest.approx(one.worse_fraction, abs=1e-9)


@pytest.mark.parametrize("repeats", [3, 5, 10])
def test_interval_covers_the_truth_as_often_as_it_says(repeats: int) -> None:
    """Experiments without an effect; 95 % are asked for, more is allowed, 1.5 % less is chance."""
    random = np.random.default_rng(repeats)
    held = 0
    for _ in range(300):
        base, new = np.exp(random.normal(0, 0.05, (2, repeats)))
        found = effect(list(base), list(new))
        assert found is not None
        held += found.interval.low <= 0 <= found.interval.high
    assert held / 300 >= 0.935


def test_more_checks_ask_for_stronger_evidence() -> None:
    base, new = [1.0, 1.02, 0.98, 1.01, 0.99], [1.05, 1.07, 1.03, 1.06, 1.04]
    one, many = effect(base, new, checks=1), effect(base, new, checks=20)
    assert one is not None
    assert many is not None
    assert one.interval == many.interval
    assert many.strict_low < one.strict_low
    assert many.detectable_fraction > one.detectable_fraction
    assert math.isfinite(many.strict_low)


def test_line_through_a_machine_that_changed_by_a_step_makes_nobody_surely_worse() -> None:
    """Per-token times of five real rounds of one deployment against itself, in turns; half of the way through a
    neighbour went. With the line taken out the pairs look alike, and all are slower.
    """
    base, again = [0.0303, 0.0239, 0.0134, 0.0154, 0.0140], [0.0296, 0.0367, 0.0147, 0.0187, 0.0205]
    taken_s = ([0.0, 91.0, 116.0, 131.0, 190.0], [19.0, 57.0, 123.0, 139.0, 165.0])
    seen = effect_of(
        base, again, is_higher_better=False, is_paired=True, confidence=0.95, checks=3, times_s=taken_s
    )  # fmt: skip
    assert seen is not None
    assert seen.strict_low < 0 < seen.worse_fraction
