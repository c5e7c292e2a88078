import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.engine.dialect import Deviations
from llamarack.gateway.stream import EventTooLong, StreamFilter

USAGE = {"completion_tokens": 2, "prompt_tokens": 3, "total_tokens": 5}


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chunk(text: str, finish_reason: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return event({"id": "c", "object": "text_completion", "choices": [choice], **fields})


DELTAS = chunk(" Zürich 🙂") + chunk('"usage":{"choices":[]}') + chunk("", "stop")
USAGE_CHUNK = event({"id": "c", "object": "text_completion", "choices": [], "usage": USAGE})
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"m","code":500}}\n\n'


def run(stream: bytes, *, hide: bool = False, cuts: list[int] | None = None) -> tuple[bytes, StreamFilter]:
    relay = StreamFilter(Deviations(), hide_usage=hide)
    bounds = [0, *sorted(cuts or []), len(stream)]
    return b"".join(relay.feed(stream[a:b]) for a, b in itertools.pairwise(bounds)), relay


@given(st.lists(st.integers(0, len(DELTAS + USAGE_CHUNK + DONE))), st.booleans())
def test_stream_cut_anywhere_comes_out_byte_for_byte(cuts: list[int], hide: bool) -> None:
    out, relay = run(DELTAS + USAGE_CHUNK + DONE, hide=hide, cuts=cuts)
    assert out == (DELTAS + DONE if hide else DELTAS + USAGE_CHUNK + DONE)
    assert relay.state.done
    assert relay.state.usage == USAGE
    assert relay.state.passed_events == 3


@given(st.lists(st.integers(0, 400)))
def test_event_of_nothing_never_reaches_a_client(cuts: list[int]) -> None:
    nothing = b"data: null\n\n"
    stream = nothing + DELTAS + nothing + DONE
    out, relay = run(stream, cuts=[min(cut, len(stream)) for cut in cuts])
    assert out == DELTAS + DONE
    assert relay.state.passed_events == 3


@given(st.lists(st.integers(0, 400)), st.booleans())
def test_usage_beside_the_finish_reason_gets_a_chunk_of_its_own_or_is_hidden(cuts: list[int], hide: bool) -> None:
    stream = chunk(" a") + chunk("", "length", usage=USAGE, timings={"predicted_n": 2}) + DONE
    out, relay = run(stream, hide=hide, cuts=[min(cut, len(stream)) for cut in cuts])
    finish = chunk("", "length", timings={"predicted_n": 2})
    assert out == chunk(" a") + finish + (b"" if hide else USAGE_CHUNK) + DONE
    assert relay.state.usage == USAGE


@pytest.mark.parametrize("own", [False, True])
def test_usage_of_several_choices_is_summed_into_one_last_chunk(own: bool) -> None:
    one = chunk("", "stop") + USAGE_CHUNK if own else chunk("", "stop", usage=USAGE)
    out, relay = run(one + chunk(" more") + one + DONE)
    total = {"completion_tokens": 4, "prompt_tokens": 3, "total_tokens": 7}
    expected = event({"id": "c", "object": "text_completion", "choices": [], "usage": total})
    assert out == chunk("", "stop") + chunk(" more") + chunk("", "stop") + expected + DONE
    assert relay.state.usage == total


def test_usage_beside_the_finish_reason_is_not_told_twice() -> None:
    out, relay = run(chunk("", "stop", usage=USAGE) + USAGE_CHUNK + DONE)
    assert out == chunk("", "stop") + USAGE_CHUNK + DONE
    assert relay.state.usage == USAGE


def test_usage_of_every_chunk_stays_where_the_client_asked_for_it() -> None:
    stream = chunk(" a", usage=USAGE) + chunk(" b", usage=None)
    assert run(stream)[0] == stream


def test_nothing_follows_done() -> None:
    out, relay = run(DONE + chunk("late"))
    assert out == DONE
    assert relay.feed(chunk("later")) == b""


@pytest.mark.parametrize("stream", [b": ping\n\n" + chunk("a"), b": ping\n" + chunk("a"), b":\n\n" + chunk("a")])
def test_engine_comment_is_dropped_and_what_follows_is_not(stream: bytes) -> None:
    assert run(stream)[0] == chunk("a")


@pytest.mark.parametrize("form", [ERROR, b'error: {"message":"m","code":500}\n\n'])
def test_error_event_of_either_form_ends_the_stream_and_is_kept_for_the_client(form: bytes) -> None:
    out, relay = run(chunk("a") + form + DONE)
    assert out == chunk("a")
    assert relay.over()
    assert not relay.state.done
    assert relay.state.error is not None
    assert relay.state.error["error"]["message"] == "m"


def test_text_that_quotes_an_error_is_text() -> None:
    stream = chunk('data: {"error": 1}') + DONE
    assert run(stream)[0] == stream


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        *((reason, reason) for reason in ("stop", "length", "tool_calls", "content_filter")),
        *(("", "stop"), ("eos", "stop"), ("abort", "length"), ("stopped", "length"), ("stop ", "length")),
    ],
)
def test_finish_reason_stays_within_the_closed_set(given: str, passed: str) -> None:
    assert run(chunk("", given))[0] == chunk("", passed)


def test_text_that_quotes_a_finish_reason_is_text() -> None:
    stream = chunk('{"finish_reason":"abort"}')
    assert run(stream)[0] == stream


def test_event_without_an_end_is_refused_at_its_bound() -> None:
    relay = StreamFilter(Deviations(), hide_usage=False)
    with pytest.raises(EventTooLong):
        relay.feed(b"data: " + b"x" * (16 * 1024**2))
