"""Small samples say little, and the intervals cover what they claim to cover."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.measure.distribution import bootstrap_interval, mean_interval, quantile, required_samples, summarize


@pytest.mark.parametrize(("q", "n"), [(0.5, 5), (0.9, 29), (0.95, 59), (0.99, 299), (0.999, 2995)])
def test_required_samples_are_the_published_ones(q: float, n: int) -> None:
    assert required_samples(q) == n
    assert 1 - q**n >= 0.95 > 1 - q ** (n - 1)


@pytest.mark.parametrize(("name", "n"), [("p50", 5), ("p90", 29), ("p95", 59), ("p99", 299)])
def test_quantile_is_printed_from_the_supporting_size_on(name: str, n: int) -> None:
    values = [float(i) for i in range(n)]
    assert getattr(summarize(values, with_intervals=False), name) is not None
    assert getattr(summarize(values[1:], with_intervals=False), name) is None


@given(st.lists(st.floats(0, 1e6), min_size=29, max_size=200))
def test_quantile_is_an_observed_value_with_enough_of_the_sample_below(values: list[float]) -> None:
    p90 = quantile(values, 0.9)
    assert p90 in values
    assert p90 == np.quantile(values, 0.9, method="inverted_cdf")


def test_empty_sample_is_unknown_not_zero() -> None:
    summary = summarize([])
    assert summary.n == 0
    assert summary.mean is None
    assert summary.p50 is None
    assert summary.max is None
    assert summary.mean_interval is None


def test_interval_is_the_same_for_the_same_seed_only() -> None:
    values = list(np.random.default_rng(1).exponential(size=50))
    assert mean_interval(values, seed=7) == mean_interval(values, seed=7)
    assert mean_interval(values, seed=7) != mean_interval(values, seed=8)


def test_mean_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    covered = 0
    for trial in range(200):
        interval = bootstrap_interval(
            list(random.normal(10, 2, 100)), lambda x: x.mean(axis=1), seed=trial, resamples=300
        )
        assert interval is not None
        covered += interval.low <= 10 <= interval.high
    assert 0.87 <= covered / 200 <= 0.99


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    random = np.random.default_rng(4)
    batches = np.repeat(random.normal(size=40), 10)  # ten requests share each value
    shuffled = random.permutation(batches)
    together, apart = mean_interval(list(batches), seed=0), mean_interval(list(shuffled), seed=0)
    assert together is not None
    assert apart is not None
    assert together.high - together.low > 1.5 * (apart.high - apart.low)
