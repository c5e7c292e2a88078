"""Strict parsers and the official client over real gateway streams."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.gateway import strict_parsers as strict
from tests.gateway.raw import ask, chat, data_of, text_of
from tests.gateway.strict_parsers import PARSERS, ParserBroke
from tests.rigs import Engine, GatewayRig, fake_engine, gateway_worker, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CHAT = "/v1/chat/completions"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


# -- strict parsers ---------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def beating(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, GatewayRig]]:
    """Gateways whose heartbeats come soon, by their style."""
    folder = tmp_path_factory.mktemp("beating")

    def worker(style: str) -> AbstractAsyncContextManager[GatewayRig]:
        return gateway_worker(folder, [engine.row()], name=style, heartbeat={"style": style, "interval_s": 1})

    async with worker("comment") as comment, worker("empty_delta") as empty_delta:
        yield {"comment": comment, "empty_delta": empty_delta}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streams(gateway: GatewayRig, beating: dict[str, GatewayRig]) -> dict[str, bytes]:
    """Recorded bodies by what is in them."""
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    silent = chat("[[fault prefill_s=1.5]]", stream=True, **usage)
    wanted = {
        "plain": (gateway, CHAT, chat(stream=True)),
        "usage": (gateway, CHAT, chat(stream=True, **usage)),
        "completions": (gateway, "/v1/completions", {"prompt": "[[fault usage_with_finish]]", "stream": True, **usage}),
        "tools": (gateway, CHAT, chat(stream=True, tools=[WEATHER])),
        "n=2": (gateway, CHAT, chat(stream=True, n=2)),
        "error": (gateway, CHAT, chat("[[fault error_after=3]]", stream=True)),
        "comment heartbeat": (beating["comment"], CHAT, silent),
        "empty heartbeat": (beating["empty_delta"], CHAT, silent),
        "emoji cut in two": (gateway, CHAT, chat("[[fault split_utf8]]", stream=True)),
    }
    answers = await asyncio.gather(*(ask(*each) for each in wanted.values()))
    recorded = {name: answer.body for name, answer in zip(wanted, answers, strict=True)}
    assert recorded["comment heartbeat"].startswith(b": keep-alive\n\n")
    return recorded


PLAIN = ["plain", "usage", "completions", "tools", "n=2", "empty heartbeat", "emoji cut in two", "comment heartbeat"]


@pytest.mark.parametrize("client", PARSERS)
@pytest.mark.parametrize("stream", PLAIN)
async def test_strict_client_reads_the_stream_whole(streams: dict[str, bytes], client: str, stream: str) -> None:
    if stream == "comment heartbeat" and client in strict.NO_COMMENTS:
        with pytest.raises(ParserBroke):  # the reason for the style `empty_delta`
            PARSERS[client](streams[stream])
        return
    if stream == "n=2" and client in strict.ONE_CHOICE:
        return
    body = streams[stream]
    read = PARSERS[client](body)
    assert read.error is None
    if stream == "tools":
        assert read.tool_ids == ["call_1"]
        assert json.loads(read.tool_arguments) == {"city": "Zürich"}
        assert read.finish_reason == "tool_calls"
    else:
        assert read.text == text_of(body) if stream != "n=2" else len(read.text) * 2 == len(text_of(body))
        assert len(read.text) > 20
        assert read.finish_reason == "stop"
    if stream in {"usage", "completions", "comment heartbeat", "empty heartbeat"}:
        assert read.usage is not None
        assert read.usage["completion_tokens"] == 8


@pytest.mark.parametrize("client", sorted(set(PARSERS) - strict.NO_ERROR_EVENT))
async def test_strict_client_is_shown_the_error_after_the_text(streams: dict[str, bytes], client: str) -> None:
    read = PARSERS[client](streams["error"])
    assert read.error == "told to fail"
    assert read.text == "".join(
        c["delta"].get("content") or "" for e in data_of(streams["error"]) for c in e["choices"]
    )


@pytest.mark.parametrize("client", sorted(strict.NO_ERROR_EVENT))
async def test_client_without_error_events_does_not_take_a_failed_stream_for_a_whole_one(
    streams: dict[str, bytes], client: str
) -> None:
    """It throws, or is left without a finish reason."""
    try:
        assert PARSERS[client](streams["error"]).finish_reason is None
    except ParserBroke:
        pass


# -- the official client ----------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gateway: GatewayRig) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


async def test_openai_client_reads_whole_answers_and_lists(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert (await client.completions.create(model="fake", prompt="x")).choices[0].text
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).owned_by == "llamarack"


async def test_openai_client_streams_with_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len("".join(c.choices[0].delta.content or "" for c in chunks if c.choices)) > 20
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, openai.BadRequestError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ],
)
async def test_openai_client_gets_its_error_class_for_an_engines_refusal(
    client: AsyncOpenAI, status: int, error: type[openai.APIStatusError]
) -> None:
    text: list[Any] = [{"role": "user", "content": f"[[fault refuse={status}]]"}]
    with pytest.raises(error) as caught:
        await client.chat.completions.create(model="fake", messages=text)
    assert "told to refuse" in str(caught.value)
    assert caught.value.request_id


async def test_openai_client_gets_its_error_class_for_the_gateways_own(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=-1)
    assert wrong.value.param == "max_tokens"


@pytest.mark.parametrize("fault", ["error_after=2", "close_after=2", "no_done"])
async def test_openai_client_raises_for_a_stream_that_breaks(client: AsyncOpenAI, fault: str) -> None:
    """Without an event it would take the short stream for a whole one."""
    text: list[Any] = [{"role": "user", "content": f"[[fault {fault}]]"}]
    stream = await client.chat.completions.create(model="fake", messages=text, stream=True)
    seen: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk)

    with pytest.raises(openai.APIError):
        await read()
    assert len(seen) >= 3


async def test_openai_client_repeats_what_was_overloaded_and_gets_its_answer(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("overloaded")
    async with (
        fake_engine(folder, slots=1) as small,
        gateway_worker(folder, [small.row()], max_queue_requests=0, max_queue_s=1) as gateway,
        AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=8) as client,
    ):
        held = asyncio.create_task(ask(gateway, CHAT, chat("[[fault prefill_s=1.5]]")))
        await until(small.requests, "the slot is taken")
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES)
        assert answer.choices
        assert (await held).status == 200


async def test_openai_client_that_closes_its_stream_reaches_the_engine(client: AsyncOpenAI, engine: Engine) -> None:
    text: list[Any] = [{"role": "user", "content": "[[fault stall_after=2]]"}]
    stream = await client.chat.completions.create(model="fake", messages=text, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(engine.is_idle, "the engine is told")
