"""Who kept the promise; failures never do."""

import pytest

from llamarack.errors import UsageError
from llamarack.measure.record import ErrorKind
from llamarack.measure.slo import Slo, goodput, keeps, parse_slo
from tests.measure.streams import stream

FAST = stream((100, 1), (110, 1))
SLOW = stream((900, 1), (910, 1))
FAILED = stream((1, 1), (2, 1), error_kind=ErrorKind.IN_BAND)
TTFT_500 = Slo(first_token_s=0.5)


def test_slo_is_read_in_milliseconds() -> None:
    assert parse_slo("ttft:500,tpot:50, e2el:9000") == Slo(first_token_s=0.5, per_token_s=0.05, end_to_end_s=9.0)


@pytest.mark.parametrize("text", ["ttft", "ttft:fast", "latency:5", "ttft:0", "ttft:nan", "", "ttft:500,"])
def test_slo_that_cannot_be_read_names_the_part(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_slo(text)
    assert caught.value.hint == "--slo ttft:500,tpot:50"


def test_goodput_divides_by_all_attempts_and_counts_no_failure() -> None:
    result = goodput([FAST, FAST, SLOW, FAILED], TTFT_500, duration_s=2, from_scheduled=False)
    assert result is not None
    assert result.requests_per_s == 1.0
    assert result.attainment_fraction == 0.5
    assert result.attempts == 4
    assert result.requests_per_s_interval is not None
    assert result.requests_per_s_interval.low <= 1.0 <= result.requests_per_s_interval.high


def test_open_loop_promise_counts_from_the_scheduled_time() -> None:
    late = stream((700, 1), sent_ms=650)
    assert keeps(late, TTFT_500, from_scheduled=False) is True
    assert keeps(late, TTFT_500, from_scheduled=True) is False


def test_unknown_time_makes_goodput_unknown_unless_another_bound_is_broken() -> None:
    packed = stream((100, None), (110, None), output_tokens=20)
    slo = Slo(first_token_s=0.5, per_token_s=0.05)
    assert keeps(packed, slo, from_scheduled=False) is None
    assert goodput([FAST, packed], slo, duration_s=1, from_scheduled=False) is None
    assert keeps(packed, Slo(first_token_s=0.05, per_token_s=0.05), from_scheduled=False) is False


def test_single_token_keeps_a_per_token_promise() -> None:
    assert keeps(stream((100, 1), output_tokens=1), Slo(per_token_s=0.001), from_scheduled=False) is True


def test_no_requests_have_no_goodput() -> None:
    assert goodput([], TTFT_500, duration_s=1, from_scheduled=False) is None
