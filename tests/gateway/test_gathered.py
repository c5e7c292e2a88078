"""Whole answers that an engine is asked for as streams: the same answer, and an end when the client leaves."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.engine import ADAPTORS
from llamarack.gateway import body as bodies
from llamarack.gateway.gathered import Gathered, as_stream
from tests.gateway.raw import ask, chat, connect, post_bytes
from tests.gateway.test_body import row
from tests.rigs import Engine, GatewayRig, until

_DEVIATIONS = ADAPTORS["llamacpp"].deviations
_ABOUT = {"id": "chatcmpl-1", "created": 1, "model": "m", "system_fingerprint": "b0", "object": "chat.completion.chunk"}


def _events(parts: list[str], *, chat: bool) -> bytes:
    """As llama.cpp sends them, recorded with xllamacpp 2026.10.11549."""
    chunks: list[dict[str, Any]] = []
    if chat:
        chunks = [{"choices": [{"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}]}]
        chunks += [{"choices": [{"finish_reason": None, "index": 0, "delta": {"content": part}}]} for part in parts]
        chunks += [
            {"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}]},
            {"choices": [], "usage": {"n": 3}},
        ]
    else:
        for part in parts:
            chunks.append({"choices": [{"text": part, "index": 0, "logprobs": None, "finish_reason": None}]})
        last = {"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}
        chunks.append({"choices": [last], "usage": {"n": 3}})
    told = [b"data: " + json.dumps(chunk | _ABOUT).encode() for chunk in chunks]
    return b"\n\n".join([*told, b"data: [DONE]", b""])


@given(st.lists(st.text(), max_size=6), st.booleans(), st.integers(1, 40))
def test_the_answer_is_that_of_the_parts_however_the_bytes_come(parts: list[str], is_chat: bool, size: int) -> None:
    data = b": ping\n\n" + _events(parts, chat=is_chat)
    gathered = Gathered(_DEVIATIONS, "chat" if is_chat else "text")
    ends = [gathered.feed(data[at : at + size]) for at in range(0, len(data), size)]
    assert ends[-1] is gathered.done is True
    answer = json.loads(gathered.answer())
    (choice,) = answer.pop("choices")
    text = "".join(parts)
    said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text, "logprobs": None}
    assert choice == {"index": 0, "finish_reason": "stop", **said}
    kind = "chat.completion" if is_chat else "text_completion"
    assert answer == {**_ABOUT, "object": kind, "usage": {"n": 3}}


def test_an_error_among_the_events_is_the_end() -> None:
    gathered = Gathered(_DEVIATIONS, "text")
    data = _events(["a"], chat=False).split(b"\n\n")[0]
    assert gathered.feed(data + b'\n\nerror: {"code":500,"message":"out of room"}\n\n')
    assert gathered.error is not None
    assert gathered.error["error"]["message"] == "out of room"
    assert not gathered.done


def _asked(value: dict[str, Any]) -> dict[str, Any] | None:
    raw = json.dumps({"model": "m", "prompt": "x", **value}).encode()
    parsed = bodies.parse(raw, {"m": row()}, shape="text")
    body = as_stream(bodies.for_engine(raw, parsed, row()), parsed)
    return None if body is None else json.loads(body)


@pytest.mark.parametrize(
    "given",
    [{}, {"stream": False}, {"stream": None, "logprobs": None}, {"n": 2}, {"logprobs": 3}, {"prompt": ["a", "b"]}],
)
def test_a_plain_request_is_asked_as_a_stream_and_else_as_it_came(given: dict[str, Any]) -> None:
    asked = _asked(given)
    assert asked is not None
    assert asked.pop("stream") is True
    assert asked.pop("stream_options") == {"include_usage": True}
    assert {"stream": asked.get("stream"), **asked}.items() >= {k: v for k, v in given.items() if k != "stream"}.items()


@pytest.mark.parametrize(
    "given",
    [{"stream": True}, {"max_tokens": 16}, {"return_tokens": True}, {"n_probs": 3}, {"return_progress": True}],
)
def test_what_would_come_back_otherwise_is_not_asked_as_a_stream(given: dict[str, Any]) -> None:
    assert _asked(given) is None


@pytest.mark.process
@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_is_asked_for_a_stream_and_the_client_gets_a_whole_answer(
    gateway: GatewayRig, engine: Engine
) -> None:
    answer = await ask(gateway, "/v1/chat/completions", chat("gathered", stream=False))
    value = json.loads(answer.body)
    assert value["object"] == "chat.completion"
    assert value["choices"][0]["message"]["content"]
    assert value["usage"]["completion_tokens"] > 0
    assert json.loads(await engine.last_body())["stream"] is True
    async with connect(gateway) as client:
        await client.send(post_bytes("/v1/chat/completions", chat("[[fault stall_after=2]]", stream=False)))
        await until(lambda: engine.requests(), "it is there")
        client.leave()
        await until(engine.is_idle, "the engine is told")


@pytest.mark.process
@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_among_gathered_events_is_told_as_one_of_a_whole_answer(gateway: GatewayRig) -> None:
    answer = await ask(gateway, "/v1/chat/completions", chat("[[fault error_after=2]]", stream=False))
    assert answer.status == 500
    assert answer.headers["x-should-retry"] == "false"  # the same prompt meets the same fault
    assert answer.json["error"]["message"] == "told to fail"
