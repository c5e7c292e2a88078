"""Records of one level -> figures that can be worked out by hand."""

from dataclasses import replace

import pytest

from llamarack.measure.distribution import summarize
from llamarack.measure.lag import Lag
from llamarack.measure.point import Judging, Level, Measured, point_result, window_ns
from llamarack.measure.record import ErrorKind, Phase
from llamarack.measure.slo import Slo
from llamarack.measure.worker import WorkerReport
from tests.measure.streams import at, stream

CALM = WorkerReport(
    worker=0,
    lag=Lag(event_loop_s=summarize([0.001] * 300, with_intervals=False), cpu_fraction=0.1),
    connect_s=(0.0002,) * 5,
)
JUDGING = Judging(
    slo=Slo(first_token_s=0.15),
    is_fixed_length=False,
    is_cache_wanted=False,
    template_tokens=0,
    round_trip_s=None,
    seed=1,
)


def steady(count: int = 40, *, scheduled_every_ms: float = 100.0):
    """One slot, each answer of five tokens 20 ms apart after 20 ms: 50 tokens per second without a pause."""
    return [
        stream(*((20 * (i + 1), 1) for i in range(5)), scheduled_ms=scheduled_every_ms * n, output_tokens=5)
        for n in range(count)
    ]


def measured(*records, **more) -> Measured:
    return Measured(records=records, workers=(CALM,), counters=None, **more)


def test_steady_stream_gives_its_rates_and_is_valid() -> None:
    result = point_result(Level(concurrency=1), [measured(*steady())], JUDGING)
    assert result.invalid_reasons == ()
    assert result.valid
    assert result.output_tokens_per_s == pytest.approx(50.0)
    assert result.requests_per_s == pytest.approx(10.0)
    assert result.goodput_requests_per_s == pytest.approx(10.0)
    assert result.metrics.ttft_s.p90 == pytest.approx(0.020)
    assert result.metrics.ttft_s.p99 is None
    assert result.tokens_per_chunk == 1.0


def test_warm_up_and_cool_down_count_for_throughput_and_not_for_times() -> None:
    warm = stream((20, 1), (3900, 1), phase=Phase.WARM_UP, scheduled_ms=50, output_tokens=2)
    result = point_result(Level(concurrency=2), [measured(*steady(), warm)], JUDGING)
    assert result.requests == 40
    assert result.metrics.end_to_end_s.max == pytest.approx(0.1)
    assert result.output_tokens_per_s == pytest.approx(50.0 + 2 / 4.0)


def test_failures_are_counted_by_kind_and_lower_goodput() -> None:
    failed = [stream(scheduled_ms=n, finished_ms=1, error_kind=ErrorKind.IN_BAND) for n in (1, 2)]
    result = point_result(Level(concurrency=1), [measured(*steady(), *failed)], JUDGING)
    assert result.failures == 2
    assert result.failures_by_kind == {"in_band": 2}
    assert not result.valid
    assert result.goodput is not None
    assert result.goodput.attainment_fraction == pytest.approx(40 / 42)


def test_three_repeats_give_an_interval_over_repeats() -> None:
    repeats = [measured(*steady(scheduled_every_ms=each)) for each in (100.0, 101.0, 102.0)]
    result = point_result(Level(concurrency=1), repeats, JUDGING)
    rates = [repeat.output_tokens_per_s for repeat in result.repeats]
    assert None not in rates
    interval = result.output_tokens_per_s_interval
    assert interval is not None
    # By hand: mean of the three, plus and minus t(2) = 4.303 standard errors.
    mean = sum(rate or 0 for rate in rates) / 3
    deviation = (sum(((rate or 0) - mean) ** 2 for rate in rates) / 2) ** 0.5
    assert interval.high - interval.low == pytest.approx(2 * 4.303 * deviation / 3**0.5)
    assert result.output_tokens_per_s == pytest.approx(mean)


def test_server_that_slows_down_is_drift() -> None:
    slow = [
        stream(*((40 * (i + 1), 1) for i in range(5)), scheduled_ms=4000 + 200 * n, output_tokens=5) for n in range(20)
    ]
    result = point_result(Level(concurrency=1), [measured(*steady(), *slow)], JUDGING)
    assert [reason.split(":")[0] for reason in result.invalid_reasons] == ["drift"]


def test_slots_in_step_whose_tokens_come_in_a_lump_are_no_drift() -> None:
    """Ten rounds of two slots, all tokens at a round's end: by arrival one half has five rounds, the other four."""
    rounds = [
        stream((480, 1), (490, 1), (500, 2), scheduled_ms=500 * number + 5 * slot, output_tokens=4)
        for number in range(11)
        for slot in range(2)
    ]
    warm = [stream((100, 2), (500, 2), scheduled_ms=-500 + 5 * slot, output_tokens=4) for slot in range(2)]
    lead = [replace(each, phase=Phase.WARM_UP) for each in warm]
    result = point_result(Level(concurrency=2), [measured(*rounds, *lead)], JUDGING)
    assert result.invalid_reasons == ()


def test_request_cut_off_at_the_end_counts_for_its_time_as_the_finished_ones_do() -> None:
    """Without them the second half would lack a slot for a while."""
    slots = [stream(*((40 * (i + 1), 1) for i in range(5)), scheduled_ms=200 * n, output_tokens=5) for n in range(20)]
    other = [replace(each, index=1) for each in slots[:15]]
    cut = replace(stream(scheduled_ms=3000, finished_ms=1000), is_cancelled=True)
    result = point_result(Level(concurrency=2), [measured(*slots, *other, cut)], JUDGING)
    assert result.invalid_reasons == ()
    without = point_result(Level(concurrency=2), [measured(*slots, *other)], JUDGING)
    assert [reason.split(":")[0] for reason in without.invalid_reasons] == ["drift"]


def test_interrupted_point_keeps_its_figures_and_is_invalid() -> None:
    result = point_result(Level(concurrency=1), [measured(*steady(), is_interrupted=True)], JUDGING)
    assert result.metrics.ttft_s.n == 40
    assert result.invalid_reasons == ("interrupted before its end",)


def test_request_broken_off_by_the_end_of_the_run_is_neither_success_nor_failure() -> None:
    broken_off = replace(stream((1, 1), scheduled_ms=3950), is_cancelled=True)
    result = point_result(Level(concurrency=1), [measured(*steady(), broken_off)], JUDGING)
    assert (result.requests, result.failures, result.metrics.ttft_s.n) == (40, 0, 40)


def test_point_without_a_request_has_no_figures() -> None:
    result = point_result(Level(concurrency=1), [measured()], JUDGING)
    assert result.output_tokens_per_s is None
    assert result.metrics.ttft_s.mean is None
    assert result.goodput_requests_per_s is None
    assert not result.valid


def test_window_spans_the_measured_requests_only() -> None:
    records = [stream((10, 1), scheduled_ms=100), stream((10, 1), scheduled_ms=500, phase=Phase.COOL_DOWN)]
    assert window_ns(records) == (at(100), at(110))
    assert window_ns(records[1:]) is None
