from hypothesis import given
from hypothesis import strategies as st

from llamarack.config import Gateway
from llamarack.gateway.deadlines import deadlines

SETTINGS = Gateway(max_queue_s=30, request_timeout_s=600)


def test_clients_own_timeouts_shorten_the_queue_and_the_request() -> None:
    found = deadlines({"x-stainless-timeout": "20"}, SETTINGS, stream=True, usual_s=5)
    assert (found.total_s, found.queue_s) == (20, 15)
    found = deadlines({"x-stainless-read-timeout": "10"}, SETTINGS, stream=False, usual_s=4)
    assert (found.total_s, found.queue_s) == (600, 6)
    found = deadlines({"x-stainless-read-timeout": "10"}, SETTINGS, stream=True, usual_s=4)
    assert (found.queue_s, found.status_s, found.heartbeat_s) == (30, 5, 5)
    assert deadlines({"x-stainless-timeout": "2"}, SETTINGS, stream=False, usual_s=9).queue_s == 0.05


def test_clients_without_timeouts_or_with_words_get_the_files() -> None:
    for headers in ({}, {"x-stainless-timeout": "NOT_GIVEN", "x-stainless-read-timeout": "-1"}):
        found = deadlines(headers, SETTINGS, stream=True, usual_s=0)
        assert (found.queue_s, found.total_s, found.status_s, found.heartbeat_s) == (30, 600, 45, 8)


@given(st.text(max_size=12), st.text(max_size=12), st.booleans(), st.floats(0, 1e9))
def test_deadlines_never_exceed_the_files_nor_are_they_ever_zero(
    total: str, silence: str, stream: bool, usual_s: float
) -> None:
    headers = {"x-stainless-timeout": total, "x-stainless-read-timeout": silence}
    found = deadlines(headers, SETTINGS, stream=stream, usual_s=usual_s)
    assert 0 < found.queue_s <= 30
    assert 0 < found.total_s <= 600
    assert 0 < found.status_s <= 45
    assert 0 < found.heartbeat_s <= 8
