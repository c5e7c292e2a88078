"""Teacher-forced comparison against distributions that are known whole."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.judge.forced import forced_errors, forced_stats, is_tie, margin_of, position_error, truncated_kl
from tests.judge.observed import observed, position, sure

VOCABULARY = 12


def normalised(weights: list[float]) -> dict[int, float]:
    total = math.fsum(weights)
    return {token: weight / total for token, weight in enumerate(weights)}


distributions = st.lists(st.floats(1e-3, 1.0), min_size=VOCABULARY, max_size=VOCABULARY).map(normalised)


def whole_kl(p: dict[int, float], q: dict[int, float]) -> float:
    return math.fsum(p[token] * math.log(p[token] / q[token]) for token in p)


@given(distributions, distributions, st.integers(2, VOCABULARY), st.integers(2, VOCABULARY))
def test_truncated_kl_is_a_lower_bound_of_the_whole_one(
    p: dict[int, float], q: dict[int, float], told: int, also_told: int
) -> None:
    kl, mass = truncated_kl(position(0, p, top=told), position(0, q, top=also_told))
    assert -1e-12 <= kl <= whole_kl(p, q) + 1e-6
    assert 0 <= mass <= 1


@given(distributions, distributions)
def test_kl_of_all_told_is_the_whole_one(p: dict[int, float], q: dict[int, float]) -> None:
    kl, mass = truncated_kl(position(0, p), position(0, q))
    assert kl == pytest.approx(whole_kl(p, q), abs=1e-6)
    assert mass == pytest.approx(1)


@given(distributions, st.integers(2, VOCABULARY))
def test_equal_distributions_have_no_error(p: dict[int, float], told: int) -> None:
    best = max(p, key=lambda token: p[token])
    error = position_error(position(best, p, top=told), position(best, p, top=told), 0)
    assert error.agrees
    assert error.kl == pytest.approx(0, abs=1e-12)
    assert error.logprob_error == 0
    assert error.margin == 0


def test_margin_of_an_untold_token_is_only_a_bound() -> None:
    reference = position(1, {1: 0.6, 2: 0.3, 3: 0.1}, top=2)
    assert margin_of(reference, 2) == (pytest.approx(math.log(2)), False)
    assert margin_of(reference, 3) == (pytest.approx(math.log(2)), True)
    error = position_error(reference, sure(3), 0)
    assert not is_tie(error, tie_nats=10)  # a bound never proves a tie


def test_flips_are_ties_within_the_noise_and_real_beyond() -> None:
    reference = observed([sure(1, second=2, margin=0.01), sure(3, second=4, margin=1.5), sure(5)])
    candidate = observed(
        [
            position(1, {2: 0.51, 1: 0.49}),  # prefers the other one of two that the reference likes alike
            position(3, {4: 0.8, 3: 0.2}),
            sure(5),
        ]
    )
    stats = forced_stats([forced_errors(reference, candidate)], tie_nats=0.02, seed=0)
    assert (stats.positions, stats.ties, stats.real, stats.untold) == (3, 1, 1, 0)
    assert stats.agreement == pytest.approx(1 / 3)
    assert stats.logprob_error_max == pytest.approx(math.log(1 / (1 + math.exp(-1.5)) / 0.2))


def test_token_that_the_candidate_does_not_tell_is_counted_not_guessed() -> None:
    stats = forced_stats(
        [forced_errors(observed([sure(1)]), observed([position(1, {7: 0.9, 8: 0.1})]))], tie_nats=0, seed=0
    )
    assert stats.untold == 1
    assert stats.logprob_error_mean is None
    assert stats.covered_mass_mean == 0
    assert stats.real == 1


def test_interval_resamples_questions_and_holds_the_mean() -> None:
    good = forced_errors(observed([sure(1)] * 10), observed([sure(1)] * 10))
    bad = forced_errors(observed([sure(1)] * 10), observed([position(1, {2: 0.9, 1: 0.1})] * 10))
    stats = forced_stats([good, good, bad], tie_nats=0, seed=0)
    assert stats.agreement == pytest.approx(2 / 3)
    assert stats.agreement_interval is not None
    assert stats.agreement_interval.low <= 1 / 3  # one bad question of three may be drawn twice
    assert stats.agreement_interval.high == 1
    assert forced_stats([bad], tie_nats=0, seed=0).agreement_interval is None


def test_passes_over_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="different tokens"):
        forced_errors(observed([sure(1)]), observed([sure(2)]))


def test_nothing_gives_unknown_not_zero() -> None:
    stats = forced_stats([], tie_nats=0, seed=0)
    assert stats.positions == 0
    assert stats.agreement is stats.kl_mean is stats.logprob_error_p99 is None
