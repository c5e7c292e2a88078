"""What a client reads of a stream, byte for byte, and what the engine was asked for it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from llamarack.config import Defaults
from tests.gateway.raw import Broken, ask, chat, connect, data_of, events, post_bytes, text_of
from tests.rigs import Engine, GatewayRig, fake_engine, gateway_worker, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def test_stream_has_the_exact_headers_and_events(gateway: GatewayRig) -> None:
    answer = await ask(gateway, CHAT, chat(stream=True, max_tokens=3))
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in answer.headers
    *chunks, done = events(answer.body)
    assert done == b"data: [DONE]"
    assert len(chunks) == 5  # role, three tokens, finish reason
    for each in chunks:
        assert each.startswith(b"data: {")
        assert b"\n" not in each
        assert b"\r" not in each
        value = json.loads(each[6:])
        assert {"id", "object", "created", "model", "choices"} <= set(value)
        assert "error" not in value
        assert value["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("offer", ["gzip", "gzip, deflate, br"])
async def test_stream_is_never_compressed(gateway: GatewayRig, offer: str) -> None:
    answer = await ask(gateway, CHAT, chat(stream=True), Accept_Encoding=offer)
    assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "accept", ["application/json", "text/event-stream", "image/png", "text/html;q=0.1", "nonsense"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_accept_decides_nothing(gateway: GatewayRig, accept: str, stream: bool) -> None:
    answer = await ask(gateway, CHAT, chat(stream=stream), Accept=accept)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")


@pytest.mark.parametrize("given", [{}, {"stream": None}, {"stream": False}, {"stream_options": None}])
async def test_without_stream_the_answer_is_one_object(gateway: GatewayRig, given: dict[str, Any]) -> None:
    answer = await ask(gateway, CHAT, chat(**given))
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert answer.json["usage"]["total_tokens"] > 0


async def test_whole_answer_has_a_finish_reason_of_the_closed_set_and_else_the_engines_bytes(
    gateway: GatewayRig, engine: Engine
) -> None:
    answer = (
        '{ "choices": [{"index":0, "finish_reason": "abort","message":{"content":"\\"finish_reason\\":\\"abort\\""}}]}'
    )
    async with engine.ordered(refuse=200, refuse_body=answer):
        got = await ask(gateway, CHAT, chat(return_tokens=True))  # so that it is asked as it came
    assert got.body.decode() == answer.replace('"abort",', '"length",')


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fault", ["", "[[fault usage_with_finish]]"])
@pytest.mark.parametrize("asked", [False, True])
async def test_usage_is_in_one_last_chunk_without_choices_or_hidden(
    gateway: GatewayRig, engine: Engine, path: str, fault: str, asked: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if asked else {}
    body = chat(fault, stream=True, max_tokens=3, **options)
    answer = await ask(gateway, path, {**body, "prompt": fault})
    chunks = data_of(answer.body)
    with_usage = [i for i, chunk in enumerate(chunks) if chunk.get("usage") is not None]
    assert with_usage == ([len(chunks) - 1] if asked else [])
    assert [i for i, chunk in enumerate(chunks) if not chunk["choices"]] == with_usage
    if asked:
        assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["length"]
    assert json.loads(await engine.last_body())["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("fault", ["split_utf8", "byte_at_a_time", "pings", "tokens_per_chunk=3"])
async def test_stream_cut_up_by_the_engine_comes_out_whole(gateway: GatewayRig, fault: str) -> None:
    sound = await ask(gateway, CHAT, chat(stream=True, max_tokens=8))
    answer = await ask(gateway, CHAT, chat(f"[[fault {fault}]]", stream=True, max_tokens=8))
    assert len(text_of(answer.body)) > 20
    assert all(each.startswith(b"data: ") for each in events(answer.body))
    assert text_of(answer.body).encode().decode() == text_of(answer.body)
    if "tokens" not in fault:
        assert len(events(answer.body)) == len(events(sound.body))


async def test_each_event_comes_in_one_piece(gateway: GatewayRig) -> None:
    """Some clients decode each buffer by itself: an event in two writes splits their characters."""
    async with connect(gateway) as client:
        body = chat("[[fault byte_at_a_time token_interval_s=0.01]]", stream=True, max_tokens=8)
        await client.send(post_bytes(CHAT, body))
        await client.head()
        async for piece in client.chunks():
            assert piece.startswith(b"data: ")
            assert piece.endswith(b"\n\n")
            piece.decode()


async def test_unknown_fields_and_bytes_reach_the_engine_as_they_are(gateway: GatewayRig, engine: Engine) -> None:
    messages = b'"messages":[{"role":"user","content":"\\u00fc \xc3\xbc"}]'
    raw = b"{ " + messages + b',\n"x_custom": 1e2, "min_p" : 0.10, "model":"fake"}'
    assert (await ask(gateway, CHAT, raw)).status == 200
    assert await engine.last_body() == raw


async def test_defaults_are_spliced_in_front_of_the_clients_bytes(tmp_path: Path, engine: Engine) -> None:
    defaults = Defaults(max_tokens=3, temperature=0.5)
    async with gateway_worker(tmp_path, [engine.row()], defaults=defaults) as gateway:
        raw = b'{"messages":[1],  "logprobs": 3 }'  # one that goes as it came
        answer = await ask(gateway, CHAT, raw)
        assert answer.json["usage"]["completion_tokens"] == 3
        assert await engine.last_body() == b'{"max_tokens":3,"temperature":0.5,' + raw[1:]


@pytest.mark.parametrize("where", ["header_delay_s", "prefill_s"])
async def test_headers_come_before_a_slow_first_token(gateway: GatewayRig, engine: Engine, where: str) -> None:
    """Java's read timeout is the time to the headers; the engine's first byte may take minutes."""
    async with connect(gateway) as client:
        await client.send(post_bytes(CHAT, chat(f"[[fault {where}=3600]]", stream=True)))
        status, headers = await client.head()
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert (await engine.requests())[-1]["tokens"] == 0
    await until(engine.is_idle, "the engine is told")


async def test_engine_may_refuse_a_stream_with_its_own_status(gateway: GatewayRig) -> None:
    answer = await ask(gateway, CHAT, chat("[[fault refuse=400]]", stream=True))
    assert answer.status == 400
    assert answer.error["message"] == "told to refuse"


@pytest.mark.parametrize("form", ["data", "error"])
async def test_engine_error_in_a_stream_becomes_the_error_event_and_no_done(gateway: GatewayRig, form: str) -> None:
    answer = await ask(gateway, CHAT, chat(f"[[fault error_after=2 error_form={form}]]", stream=True))
    *sound, last = events(answer.body)
    assert len(sound) == 3
    name, data = last.split(b"\n")
    assert name == b"event: error"
    error = json.loads(data.removeprefix(b"data: "))["error"]
    assert error["message"] == "told to fail"
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["code"] is None or isinstance(error["code"], str)
    assert b"[DONE]" not in answer.body


@pytest.mark.parametrize(
    "fault", ["crash_after=2", "crash_after=2 crash_with=SIGSEGV", "close_after=2", "reset_after=2"]
)
async def test_engine_that_dies_in_a_stream_gives_the_error_event_after_what_came(tmp_path: Path, fault: str) -> None:
    async with fake_engine(tmp_path) as engine, gateway_worker(tmp_path, [engine.row()]) as gateway:
        answer = await ask(gateway, CHAT, chat(f"[[fault {fault} token_interval_s=0.02]]", stream=True))
    *sound, last = events(answer.body)
    assert len(sound) == 3  # role and two tokens
    assert last.startswith(b"event: error\ndata: {")
    assert json.loads(last.split(b"data: ")[1])["error"]["code"] == "upstream_failed"
    assert b"[DONE]" not in answer.body


async def test_stream_without_done_is_told_from_a_whole_one(gateway: GatewayRig) -> None:
    answer = await ask(gateway, CHAT, chat("[[fault no_done]]", stream=True))
    assert events(answer.body)[-1].startswith(b"event: error\n")


async def test_client_that_does_not_read_is_cut_off_at_the_requests_deadline(tmp_path: Path) -> None:
    """No event can be sent to it: the connection is aborted, and the engine gets its slot back."""
    async with (
        fake_engine(tmp_path, answer_tokens=10**9, tokens_per_chunk=5000) as engine,
        gateway_worker(tmp_path, [engine.row()], request_timeout_s=2) as gateway,
        connect(gateway) as client,
    ):
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post_bytes(CHAT, chat(stream=True, n=8)))  # some 250 kB an event: more than TCP holds for it
        await until(engine.requests, "the engine has it")
        await until(engine.is_idle, "the engine is told")
        await until(lambda: f"POST {CHAT}" in gateway.log_text(), "the gateway gives it up")
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await client.head()
        with pytest.raises(Broken):
            async for _ in client.chunks():
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_request_past_its_deadline_is_ended_and_not_to_be_repeated(tmp_path: Path, stream: bool) -> None:
    async with (
        fake_engine(tmp_path) as engine,
        gateway_worker(tmp_path, [engine.row()], request_timeout_s=1.5) as gateway,
    ):
        answer = await ask(gateway, CHAT, chat("[[fault stall_after=2]]", stream=stream))
        if stream:
            last = events(answer.body)[-1]
            assert last.startswith(b"event: error\n")
            assert b'"deadline_exceeded"' in last
        else:
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
            assert answer.headers["x-should-retry"] == "false"
        await until(engine.is_idle, "the engine is told")


async def test_silent_stream_gets_heartbeats_of_each_style(tmp_path: Path) -> None:
    styles = {"comment": b": keep-alive\n\n", "empty_delta": b"data: {", "off": b""}
    async with fake_engine(tmp_path, slots=8) as engine:

        async def beats(style: str) -> list[bytes]:
            """In a silent prefill, and after the role and two tokens."""
            heartbeat = {"style": style, "interval_s": 1}
            async with gateway_worker(
                tmp_path, [engine.row()], name=style, heartbeat=heartbeat, request_timeout_s=3.5
            ) as gateway:
                bodies = [chat(f"[[fault {stall}]]", stream=True) for stall in ("stall_prefill", "stall_after=2")]
                early, late = await asyncio.gather(*(ask(gateway, CHAT, body) for body in bodies))
            found = [*events(early.body), *events(late.body)[3:]]
            assert [each.startswith(b"event: error\n") for each in found].count(True) == 2  # the deadline's
            return [each + b"\n\n" for each in found if not each.startswith(b"event: error\n")]

        found = dict(zip(styles, await asyncio.gather(*(beats(style) for style in styles)), strict=True))
    assert set(found["comment"]) == {styles["comment"]}
    assert found["off"] == []
    assert len(found["empty_delta"]) >= 2
    for beat in found["empty_delta"]:
        value = json.loads(beat.removeprefix(b"data: "))
        assert value["choices"] == [{"index": 0, "finish_reason": None, "logprobs": None, "delta": {"content": ""}}]
        assert (value["object"], value["model"]) == ("chat.completion.chunk", "fake")
