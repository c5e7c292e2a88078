"""/tokenize and /detokenize take both engines' shapes and end like every other request."""

import asyncio
from pathlib import Path

import pytest

from tests.gateway.raw import ask, connect, post_bytes
from tests.rigs import Engine, GatewayRig, fake_engine, gateway_worker, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("field", ["prompt", "content"])
async def test_text_becomes_tokens_and_text_again(gateway: GatewayRig, engine: Engine, field: str) -> None:
    answer = (await ask(gateway, "/tokenize", {"model": "fake", field: "Zürich 🙂"})).json
    assert answer["count"] == len(answer["tokens"]) == len("Zürich 🙂".encode()) + 1
    assert answer["max_model_len"] == engine.context_tokens
    back = (await ask(gateway, "/v1/detokenize", {"model": "fake", "tokens": answer["tokens"]})).json
    assert back == {"prompt": "Zürich 🙂", "content": "Zürich 🙂"}


async def test_special_tokens_are_left_out_where_asked(gateway: GatewayRig) -> None:
    counts = [
        (await ask(gateway, "/tokenize", {"prompt": "ab", **words})).json["count"]
        for words in ({}, {"add_special_tokens": False}, {"add_special": False})
    ]
    assert counts == [3, 2, 2]


async def test_messages_are_counted_as_the_template_renders_them(gateway: GatewayRig) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = (await ask(gateway, "/tokenize", {"messages": messages})).json
    assert bytes(token - 3 for token in answer["tokens"]) == b"<|user|>Hello<|assistant|>"


async def test_engine_that_dies_or_stalls_ends_in_an_error_and_not_in_a_hang(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path) as engine,
        gateway_worker(tmp_path, [engine.row()], request_timeout_s=1) as gateway,
    ):
        await engine.order(stall_small=True)
        answer = await ask(gateway, "/tokenize", {"prompt": "x"})
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        engine.kill()
        answer = await ask(gateway, "/tokenize", {"prompt": "x"})
        assert (answer.status, answer.error["code"]) == (502, "upstream_failed")


async def test_body_that_never_comes_is_given_up_at_the_requests_deadline(tmp_path: Path) -> None:
    """A slow-loris: a head, and then a byte now and then."""
    async with (
        fake_engine(tmp_path) as engine,
        gateway_worker(tmp_path, [engine.row()], request_timeout_s=1.5) as gateway,
    ):
        for path in ("/v1/chat/completions", "/tokenize", "/v1/embeddings"):
            async with connect(gateway) as client:
                await client.send(post_bytes(path, b"x" * 1000)[:-900])
                dripping = asyncio.create_task(client.send(*[b"x"] * 500))
                answer = await client.answer()
                assert (answer.status, answer.error["code"]) == (408, "request_timeout")
                assert answer.headers["connection"] == "close"
                dripping.cancel()
                await asyncio.gather(dripping, return_exceptions=True)


async def test_head_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path) as engine,
        gateway_worker(tmp_path, [engine.row()], request_timeout_s=1.5) as gateway,
    ):
        async with connect(gateway) as silent, connect(gateway) as dripping:
            await dripping.send(b"GET /v1/models HTTP/1.1\r\nHost: rack\r\n")
            assert await silent.ends() == b""
            assert await dripping.ends() == b""
        await until(lambda: gateway.process.poll() is None, "the worker lives")
