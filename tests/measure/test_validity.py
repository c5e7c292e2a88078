"""Each rule alone turns a good point into an invalid one, just past its bound and not at it."""

from dataclasses import replace

import pytest

from llamarack.measure.record import ErrorKind
from llamarack.measure.validity import (
    PointFacts,
    cached_fraction,
    coalesced_fraction,
    invalid_reasons,
    wrong_length_fraction,
)
from tests.measure.streams import stream

CLOSED = PointFacts(
    concurrency=8,
    rate_per_s=None,
    requests=100,
    failures=1,
    first_token_p50_s=0.2,
    lag_p99_s=0.010,
    cpu_fraction=0.9,
    schedule_delay_p99_s=None,
    delivered_fraction=None,
    round_trip_s=0.05,
    cached_fraction=0.01,
    is_cache_wanted=False,
    wrong_length_fraction=0.01,
    coalesced_fraction=0.2,
    tokens_per_s_halves=(100.0, 119.0),
    is_interrupted=False,
)
OPEN = replace(CLOSED, concurrency=None, rate_per_s=5.0, schedule_delay_p99_s=0.02, delivered_fraction=0.95)


def test_points_at_their_bounds_are_valid() -> None:
    assert invalid_reasons(CLOSED) == ()
    assert invalid_reasons(OPEN) == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"failures": 2}, "failures"),
        ({"lag_p99_s": 0.011}, "client"),
        ({"lag_p99_s": None}, "client"),
        ({"lag_p99_s": 0.006, "first_token_p50_s": 0.05, "round_trip_s": 0.001}, "client"),
        ({"cpu_fraction": 0.91}, "client"),
        ({"cached_fraction": 0.011}, "cache"),
        ({"wrong_length_fraction": 0.02}, "length"),
        ({"coalesced_fraction": 0.21}, "network"),
        ({"round_trip_s": 0.051}, "network"),
        ({"tokens_per_s_halves": (100.0, 121.0)}, "drift"),
        ({"tokens_per_s_halves": (100.0, 79.0)}, "drift"),
        ({"is_interrupted": True}, "interrupted"),
        ({"requests": 19, "failures": 0, "concurrency": 1}, "too few"),
        ({"requests": 60, "failures": 0, "concurrency": 31}, "too few"),
        ({"requests": 0, "failures": 0}, "too few"),
    ],
)
def test_each_rule_alone_makes_a_closed_point_invalid(change, word: str) -> None:
    reasons = invalid_reasons(replace(CLOSED, **change))
    assert len(reasons) == 1
    assert reasons[0].startswith(word)


def test_five_milliseconds_of_lag_are_allowed_however_fast_the_first_token_is() -> None:
    assert invalid_reasons(replace(CLOSED, lag_p99_s=0.005, first_token_p50_s=0.02, round_trip_s=0.001)) == ()


@pytest.mark.parametrize("change", [{"schedule_delay_p99_s": 0.021}, {"delivered_fraction": 0.94}])
def test_late_or_missing_requests_make_an_open_point_invalid(change) -> None:
    assert [reason.split(":")[0] for reason in invalid_reasons(replace(OPEN, **change))] == ["rate"]


def test_wanted_cache_and_unknown_facts_are_no_reasons() -> None:
    assert invalid_reasons(replace(CLOSED, cached_fraction=0.9, is_cache_wanted=True)) == ()
    unknown = replace(CLOSED, cached_fraction=None, wrong_length_fraction=None, coalesced_fraction=None)
    assert invalid_reasons(replace(unknown, tokens_per_s_halves=None, cpu_fraction=None, round_trip_s=None)) == ()


def test_events_in_one_read_are_coalesced() -> None:
    assert coalesced_fraction([stream((1, 1), (1, 1), (2, 1), (3, 1), (4, 1))]) == 0.25
    assert coalesced_fraction([stream((1, 1))]) is None


def test_template_tokens_may_come_from_the_cache() -> None:
    records = [stream((1, 1), cached_tokens=30, prompt_tokens=130)] * 2
    assert cached_fraction(records, template_tokens=30) == 0.0
    assert cached_fraction(records, template_tokens=20) == pytest.approx(10 / 110)
    assert cached_fraction([stream((1, 1), prompt_tokens=9)], template_tokens=0) is None


def test_wrong_lengths_are_counted_among_known_successes() -> None:
    right = replace(stream((1, 1), output_tokens=8), requested_output_tokens=8)
    short = replace(stream((1, 1), output_tokens=3), requested_output_tokens=8)
    failed = replace(stream((1, 1), error_kind=ErrorKind.TRUNCATED), requested_output_tokens=8)
    assert wrong_length_fraction([right, short, failed]) == 0.5
    assert wrong_length_fraction([stream((1, 1))]) is None
