"""Schedules are absolute, seeded and of the asked rate."""

import itertools
import statistics

import pytest

from llamarack.measure.arrivals import Arrivals, arrival_offsets_s


def _first(n: int, arrivals: Arrivals, rate: float, seed: int = 1) -> list[float]:
    return list(itertools.islice(arrival_offsets_s(arrivals, rate, seed=seed), n))


def test_constant_arrivals_are_multiples_of_the_interval() -> None:
    assert _first(4, Arrivals.CONSTANT, 4.0) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential() -> None:
    offsets = _first(20_000, Arrivals.POISSON, 10.0)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *offsets])]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.03)
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)


def test_poisson_schedule_is_the_same_for_the_same_seed_only() -> None:
    assert _first(5, Arrivals.POISSON, 2.0, seed=3) == _first(5, Arrivals.POISSON, 2.0, seed=3)
    assert _first(5, Arrivals.POISSON, 2.0, seed=3) != _first(5, Arrivals.POISSON, 2.0, seed=4)
