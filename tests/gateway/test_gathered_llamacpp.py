"""Answers gathered from llama.cpp's streams are its own whole answers, on a model that speaks and calls tools."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from llamarack.config import parse
from llamarack.engine import ADAPTORS
from llamarack.engine.adaptor import LaunchContext
from llamarack.engine.llamacpp import LlamaCpp
from llamarack.errors import ModelError
from llamarack.gateway import body as bodies
from llamarack.gateway.gathered import Gathered, as_stream
from llamarack.gateway.upstream import get_text
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from llamarack.supervise.engine_client import EngineClient
from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow
from tests.fake_adaptor import fake_candidate
from tests.gateway.raw import ask, connect, post_bytes
from tests.gateway.test_body import row as model_row
from tests.rigs import gateway_worker, until

pytestmark = [pytest.mark.llamacpp, pytest.mark.asyncio(loop_scope="module")]
TEMPLATE = Path(__file__).with_name("tools_template.jinja")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ReplicaRow]:
    folder = tmp_path_factory.mktemp("gathered")
    try:
        path = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    told = {"name": "m", "path": str(path), "gpus": [], "chat_template": str(TEMPLATE), "limits": {"threads": 1}}
    model = parse(json.dumps({"models": [told]})).deployment.models[0]
    context = LaunchContext(
        replica="m-0", model=model, group=model.groups[0], path=path, candidate=fake_candidate(2, 2048),
        card_uuids=(), files=folder, socket=folder / "engine.sock", key="key",
    )  # fmt: skip
    launch = LlamaCpp().launch(context)
    with (folder / "engine.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*launch.argv, env=dict(launch.env), stdout=log, stderr=log)
    try:
        async with EngineClient(launch.endpoint) as client:
            await until(client.is_up, "llama.cpp is up")
        yield ReplicaRow(
            id="m-0", model="m", engine="llamacpp", state=State.READY, endpoint=launch.endpoint, slots=2,
            context_tokens=2048,
        )  # fmt: skip
    finally:
        process.kill()
        await process.wait()


def _calls(city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": city, "type": "function", "function": function}]}


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
# A small model calls a tool when it has seen it done.
EXAMPLES = [
    message
    for city in ("Rome", "Berlin", "Madrid")
    for message in (
        {"role": "user", "content": f"What is the weather in {city}?"},
        _calls(city),
        {"role": "tool", "tool_call_id": city, "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    )
]
WITH_TOOLS = {"messages": [*EXAMPLES, *_said("What is the weather in Paris?")], "tools": TOOLS, "max_tokens": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "to its own end": (CHAT, {"messages": _said("What is the capital of France?"), "max_tokens": 64}),
    "to its limit": (CHAT, {"messages": _said("Tell me about rain."), "max_tokens": 20}),
    "other letters": (CHAT, {"messages": _said("Repeat this: café ☕ 你好 🙂 naïve."), "max_tokens": 40}),
    "sampled": (CHAT, {"messages": _said("Tell me about rain."), "max_tokens": 24, "temperature": 0.8, "seed": 7}),
    "stop": (CHAT, {"messages": _said("Count from one to nine."), "max_tokens": 60, "stop": ["5", "five"]}),
    "two choices": (CHAT, {"messages": _said("What is the capital of France?"), "max_tokens": 64, "n": 2}),
    "a tool": (CHAT, WITH_TOOLS),
    "a tool, two choices": (CHAT, WITH_TOOLS | {"n": 2}),
    "tools at hand": (CHAT, {"messages": _said("Say hello."), "tools": TOOLS, "max_tokens": 30}),
    "tools not to be used": (CHAT, WITH_TOOLS | {"tool_choice": "none", "max_tokens": 30}),
    "text": (TEXT, {"prompt": "The capital of France is", "max_tokens": 20}),
    "text, two choices": (TEXT, {"prompt": "The capital of France is", "max_tokens": 20, "n": 2}),
    "two texts": (TEXT, {"prompt": ["The capital of France is", "One, two, three,"], "max_tokens": 20}),
    "text, probabilities": (TEXT, {"prompt": "The capital of", "max_tokens": 20, "logprobs": 2}),
    "text, probabilities to its end": (
        TEXT,
        {"prompt": "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n", "max_tokens": 64, "logprobs": 1},
    ),
    "text, probabilities, other letters": (
        TEXT,
        {"prompt": "☕ 你好 🙂 ☕ 你好 🙂 ☕", "max_tokens": 24, "logprobs": 1},
    ),
}
# Not the same: see `gathered`.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, probabilities": (
        CHAT,
        {"messages": _said("What is the capital of France?"), "max_tokens": 64, "logprobs": True, "top_logprobs": 1},
    ),
    "text, probabilities, stop": (
        TEXT,
        {"prompt": "One, two, three, four,", "max_tokens": 40, "logprobs": 1, "stop": ["six"]},
    ),
}


async def _ask(engine: ReplicaRow, path: str, body: bytes) -> bytes:
    assert engine.endpoint is not None
    connector = aiohttp.UnixConnector(path=str(engine.endpoint.socket), force_close=True)
    headers = {"Authorization": "Bearer key", "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
        session.post(f"http://engine{path}", data=body) as answer,
    ):
        read = await answer.read()
        assert answer.status == 200, read
        return read


def _bare(answer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Without what is another each time, and the usage."""
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert len(call.pop("id")) > 8
    usage = answer.pop("usage")
    for name in ("id", "created", "timings"):
        assert answer.pop(name)
    return answer, usage


async def _both(engine: ReplicaRow, path: str, asked: dict[str, Any], streamed: bytes | None) -> tuple[Any, Any]:
    """The engine's own whole answer, and the one gathered from its stream."""
    own = json.loads(await _ask(engine, path, json.dumps(asked).encode()))
    as_told = streamed or json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}}).encode()
    gathered = Gathered(ADAPTORS["llamacpp"].deviations, "chat" if path == CHAT else "text")
    assert gathered.feed(await _ask(engine, path, as_told))
    assert gathered.error is None
    return own, json.loads(gathered.answer())


@pytest.mark.parametrize("case", CASES)
async def test_what_is_gathered_is_the_engines_own_whole_answer(engine: ReplicaRow, case: str) -> None:
    path, body = CASES[case]
    asked = {"model": "m", "temperature": 0, "cache_prompt": False, **body}
    raw = json.dumps(asked).encode()
    streamed = as_stream(raw, bodies.parse(raw, {"m": model_row()}, shape="chat" if path == CHAT else "text"))
    assert streamed is not None
    own, ours = await _both(engine, path, asked, streamed)
    (own, own_usage), (ours, our_usage) = _bare(own), _bare(ours)
    assert ours == own
    if case.startswith("a tool"):
        assert all(choice["message"]["tool_calls"] for choice in ours["choices"]), ours
    if len(ours["choices"]) == 1:
        assert our_usage == own_usage
    else:  # the engine's own counts the first choice alone
        assert our_usage["completion_tokens"] > own_usage["completion_tokens"]
        assert our_usage["prompt_tokens"] == own_usage["prompt_tokens"]


@pytest.mark.parametrize("case", REFUSED)
async def test_what_comes_otherwise_in_a_stream_is_asked_whole(engine: ReplicaRow, case: str) -> None:
    path, body = REFUSED[case]
    asked = {"model": "m", "temperature": 0, "cache_prompt": False, **body}
    raw = json.dumps(asked).encode()
    assert as_stream(raw, bodies.parse(raw, {"m": model_row()}, shape="chat" if path == CHAT else "text")) is None
    own, ours = await _both(engine, path, asked, None)
    assert _bare(own)[0] != _bare(ours)[0]  # the day it is, it need not be asked whole


@pytest.mark.parametrize(
    "body", [{"messages": _said("Tell me a long story."), "n": 2}, {**WITH_TOOLS, "tool_choice": "none"}]
)
async def test_client_that_leaves_ends_them_too(engine: ReplicaRow, tmp_path: Path, body: dict[str, Any]) -> None:
    assert engine.endpoint is not None
    endpoint = engine.endpoint

    async def running() -> int:
        return ADAPTORS["llamacpp"].counters(await get_text(endpoint, "/metrics", 30) or "").running or 0

    async with gateway_worker(tmp_path, [engine]) as gateway, connect(gateway) as client:
        asked = {"model": "m", **body, "max_tokens": 1500, "ignore_eos": True}
        await client.send(post_bytes(CHAT, asked))
        await until(running, "it runs")
        client.leave()

        async def is_idle() -> bool:
            return not await running()

        await until(is_idle, "the engine stops")
        after = await ask(gateway, CHAT, {"model": "m", "messages": _said("Say hi."), "max_tokens": 2})
        assert after.status == 200
