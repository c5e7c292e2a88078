"""The definitions, on streams whose numbers a reader can work out by hand."""

import pytest

from llamarack.measure import metrics
from llamarack.measure.metrics import per_token_s, request_times, tokens_in_window, waited_tokens
from llamarack.measure.record import ChunkKind, ErrorKind
from tests.measure.streams import at, stream


def test_fifty_tokens_20_ms_apart_cost_20_ms_each() -> None:
    record = stream(*((500 + 20 * i, 1) for i in range(50)), output_tokens=50)
    times = request_times(record)
    assert times.first_token_s == pytest.approx(0.5)
    assert times.per_token_s == pytest.approx(0.020)
    assert times.end_to_end_s == pytest.approx(0.5 + 49 * 0.020)
    assert times.inter_chunk_s == pytest.approx([0.020] * 49)


def test_four_tokens_a_chunk_are_divided_by_tokens_not_chunks() -> None:
    record = stream(*((100 + 80 * i, 4) for i in range(5)), output_tokens=20)
    assert per_token_s(record) == pytest.approx(0.020)
    assert request_times(record).inter_chunk_s == pytest.approx([0.080] * 4)


def test_tokens_of_the_first_chunk_were_not_waited_for() -> None:
    record = stream((100, 5), (120, 1), (140, 1), output_tokens=7)
    assert waited_tokens(record) == 2  # n - 1 would be 6
    assert per_token_s(record) == pytest.approx(0.020)


def test_uncounted_chunks_as_many_as_tokens_hold_one_each() -> None:
    assert waited_tokens(stream((1, None), (2, None), (3, None), output_tokens=3)) == 2


def test_uncounted_stream_that_stopped_by_itself_has_one_silent_end_token() -> None:
    chunks = [(1, None), (2, None), (3, None)]
    assert waited_tokens(stream(*chunks, output_tokens=4, finish_reason="stop")) == 2
    assert waited_tokens(stream(*chunks, output_tokens=4, finish_reason="length")) is None


def test_uncounted_packed_chunks_have_no_per_token_time() -> None:
    record = stream(*((i, None) for i in range(1, 6)), output_tokens=20)
    assert per_token_s(record) is None
    assert request_times(record).end_to_end_s is not None


def test_uncounted_chunks_within_five_percent_use_all_but_one_token() -> None:
    chunks = [(float(i), None) for i in range(101)]
    assert waited_tokens(stream(*chunks, output_tokens=105)) == 104
    assert waited_tokens(stream(*chunks, output_tokens=107)) is None


def test_one_token_has_a_first_token_time_and_no_per_token_time() -> None:
    times = request_times(stream((30, 1), output_tokens=1))
    assert times.first_token_s == pytest.approx(0.030)
    assert times.per_token_s is None


def test_late_sending_is_charged_to_the_scheduled_times_only() -> None:
    times = request_times(stream((700, 1), (720, 1), sent_ms=600))
    assert times.first_token_s == pytest.approx(0.1)
    assert times.first_token_from_scheduled_s == pytest.approx(0.7)
    assert times.end_to_end_s == pytest.approx(0.12)
    assert times.end_to_end_from_scheduled_s == pytest.approx(0.72)
    assert times.schedule_delay_s == pytest.approx(0.6)


def test_role_event_and_trailing_usage_move_neither_first_token_nor_end() -> None:
    times = request_times(stream((500, 1), (520, 1), first_event_ms=1, finished_ms=900))
    assert times.first_token_s == pytest.approx(0.5)
    assert times.end_to_end_s == pytest.approx(0.52)


def test_reasoning_is_a_first_token_but_no_first_answer() -> None:
    times = request_times(stream((100, 1, ChunkKind.REASONING), (200, 1), (300, 1, ChunkKind.SILENT)))
    assert times.first_token_s == pytest.approx(0.1)
    assert times.first_answer_s == pytest.approx(0.2)


def test_failed_requests_are_not_averaged_in() -> None:
    good = stream((100, 1), (120, 1))
    failed = stream((1, 1), error_kind=ErrorKind.TRUNCATED)
    summary = metrics.summarize_requests([good, failed])
    assert summary.ttft_s.n == 1
    assert summary.ttft_s.mean == pytest.approx(0.1)


def test_window_counts_the_tokens_that_arrived_inside_it() -> None:
    counted = stream((10, 2), (20, 3), (30, 4))
    uncounted = stream((10, None), (20, None), output_tokens=6)
    assert tokens_in_window([counted], at(10), at(20)) == 3
    assert tokens_in_window([counted, uncounted], at(0), at(20)) == 5 + 6
    cut_off = stream((15, None), finish_reason=None, error_kind=ErrorKind.TIMEOUT)
    assert tokens_in_window([uncounted, cut_off], at(0), at(30)) == 6 + 3  # others hold 3 tokens an event
    assert tokens_in_window([cut_off], at(0), at(30)) is None


def test_tokens_per_chunk_tells_packed_streams_from_plain_ones() -> None:
    assert metrics.tokens_per_chunk([stream((1, 4), (2, 4), output_tokens=8)]) == 4
    assert metrics.tokens_per_chunk([stream((1, None))]) is None
