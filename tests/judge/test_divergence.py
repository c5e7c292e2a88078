"""Free-running comparison: where answers part, and whether the reference cared."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.judge.divergence import Kind, first_divergence, free_run_stats, wilson
from tests.judge.observed import observed, position, sure


def test_equal_answers_do_not_part() -> None:
    one = observed([sure(1), sure(2)])
    found = first_divergence(one, one, tie_nats=0)
    assert (found.kind, found.index, found.margin_nats) == (Kind.NONE, None, None)


@pytest.mark.parametrize(("margin", "kind"), [(0.01, Kind.TIE), (0.5, Kind.REAL)])
def test_first_difference_is_judged_by_the_references_own_margin(margin: float, kind: Kind) -> None:
    reference = observed([sure(1), sure(2, second=3, margin=margin), sure(4)])
    candidate = observed([sure(1), sure(3), sure(9)])
    found = first_divergence(reference, candidate, tie_nats=0.02)
    assert (found.kind, found.index, found.reference_id, found.candidate_id) == (kind, 1, 2, 3)
    assert found.margin_nats == pytest.approx(margin)


def test_token_that_the_reference_never_thought_of_is_real() -> None:
    reference = observed([position(1, {1: 0.5, 2: 0.49, 3: 0.01}, top=2)])
    found = first_divergence(reference, observed([sure(3)]), tie_nats=1.0)
    assert found.kind is Kind.REAL
    assert found.is_margin_bound


def test_answer_that_stops_early_parts_at_its_end() -> None:
    found = first_divergence(observed([sure(1), sure(2)]), observed([sure(1)]), tie_nats=1.0)
    assert (found.kind, found.index, found.candidate_id) == (Kind.REAL, 1, None)
    assert (found.reference_tokens, found.candidate_tokens) == (2, 1)


def test_stats_count_kinds_and_lengths() -> None:
    reference = observed([sure(1), sure(2, second=3, margin=0.01)])
    found = [
        first_divergence(reference, reference, tie_nats=0.02),
        first_divergence(reference, observed([sure(1), sure(3)]), tie_nats=0.02),
        first_divergence(reference, observed([sure(8)]), tie_nats=0.02),
    ]
    stats = free_run_stats(found)
    assert (stats.questions, stats.exact, stats.ties, stats.real) == (3, 1, 1, 1)
    assert stats.first_divergence_min == 0
    assert stats.first_divergence_p50 == 0.5
    assert stats.length_ratio == pytest.approx(5 / 6)
    assert free_run_stats([]).exact_fraction is None


def test_wilson_interval_as_published() -> None:
    # Newcombe 1998, table I, method 3: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611.
    some, none = wilson(81, 263), wilson(0, 20)
    assert some is not None
    assert none is not None
    assert (round(some.low, 4), round(some.high, 4)) == (0.2553, 0.3662)
    assert (none.low, round(none.high, 4)) == (0, 0.1611)


@given(st.integers(0, 50), st.integers(1, 50))
def test_wilson_holds_the_share_and_stays_within_bounds(successes: int, more: int) -> None:
    n = successes + more
    interval = wilson(successes, n)
    assert interval is not None
    assert 0 <= interval.low <= successes / n <= interval.high <= 1
    assert math.isfinite(interval.high)
