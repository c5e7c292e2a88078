"""Any split of a stream into reads gives the same events, each stamped by the read that closed it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.measure.sse import SseDecoder

STREAM = 'data: {"a": "数据"}\n\n: ping\n\nevent: error\ndata: one\ndata: two\n\ndata: [DONE]\n\n'.encode()
PAYLOADS = ['{"a": "数据"}'.encode(), b"one\ntwo", b"[DONE]"]


def _events(reads: list[bytes]):
    decoder = SseDecoder()
    return [event for stamp, read in enumerate(reads) for event in decoder.feed(read, stamp)], decoder


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@given(cuts=st.sets(st.integers(1, len(STREAM)), max_size=30))
def test_events_split_anywhere_are_the_same(ending: bytes, cuts: set[int]) -> None:
    stream = STREAM.replace(b"\n", ending)
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    events, decoder = _events([stream[a:b] for a, b in pairwise(edges)] + [b"\n"])
    assert [event.data for event in events] == PAYLOADS
    assert [event.name for event in events] == ["", "error", ""]
    assert decoder.num_comments == 1
    assert not decoder.has_unfinished_event


@given(cut=st.integers(1, len(STREAM) - 1))
def test_event_stamp_is_the_read_that_brought_its_blank_line(cut: int) -> None:
    events, _ = _events([STREAM[:cut], STREAM[cut:]])
    ends = [STREAM.index(payload_end) + len(payload_end) for payload_end in (b'"}\n\n', b"two\n\n", b"[DONE]\n\n")]
    assert [event.read_monotonic_ns for event in events] == [0 if end <= cut else 1 for end in ends]


def test_stream_cut_inside_an_event_says_so() -> None:
    for cut in (b"data: x", b"data: x\n", b"dat"):
        _, decoder = _events([b"data: whole\n\n" + cut])
        assert decoder.has_unfinished_event, cut


def test_byte_order_mark_is_no_part_of_the_first_field() -> None:
    events, _ = _events([b"\xef\xbb\xbfdata: x\n\n"])
    assert [event.data for event in events] == [b"x"]


def test_only_one_space_after_the_colon_is_dropped() -> None:
    events, _ = _events([b"data:  x\n\ndata:y\n\n"])
    assert [event.data for event in events] == [b" x", b"y"]


def test_event_name_without_data_does_not_leak_into_the_next_event() -> None:
    events, _ = _events([b"event: error\n\ndata: x\n\n"])
    assert [(event.name, event.data) for event in events] == [("", b"x")]
