"""The real llama.cpp behind a real gateway worker: what its streams are like when clients read them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from llamarack.config import parse
from llamarack.engine.adaptor import LaunchContext
from llamarack.engine.llamacpp import LlamaCpp
from llamarack.supervise.engine_client import EngineClient
from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow
from tests.fake_adaptor import fake_candidate
from tests.gateway.raw import ask, data_of, events, text_of
from tests.gateway.strict_parsers import ONE_CHOICE, PARSERS
from tests.rigs import GatewayRig, gateway_worker, until
from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.llamacpp, pytest.mark.asyncio(loop_scope="module")]
CONTEXT_TOKENS = 512
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a b c"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[GatewayRig, ReplicaRow]]:
    folder = tmp_path_factory.mktemp("llamacpp")
    path = write_tiny_llama(folder / "tiny.gguf", context=CONTEXT_TOKENS)
    model = parse(json.dumps({"models": [{"name": "tiny", "path": str(path), "gpus": []}]})).deployment.models[0]
    context = LaunchContext(
        replica="tiny-0", model=model, group=model.groups[0], path=path, candidate=fake_candidate(2, CONTEXT_TOKENS),
        card_uuids=(), files=folder, socket=folder / "engine.sock", key="key",
    )  # fmt: skip
    launch = LlamaCpp().launch(context)
    row = ReplicaRow(
        id="tiny-0", model="tiny", engine="llamacpp", state=State.READY, endpoint=launch.endpoint, slots=2,
        context_tokens=CONTEXT_TOKENS,
    )  # fmt: skip
    with (folder / "engine.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*launch.argv, env=dict(launch.env), stdout=log, stderr=log)
    try:
        async with EngineClient(launch.endpoint) as client:
            await until(client.is_up, "llama.cpp is up")
        async with gateway_worker(folder, [row], max_output_tokens=64) as gateway:
            yield gateway, row
    finally:
        process.kill()
        await process.wait()


Rack = tuple[GatewayRig, ReplicaRow]


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_usage_is_in_one_last_chunk_or_hidden(rack: Rack, path: str, asked: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked else {}
    body = {"messages": MESSAGES, "prompt": "a b", "max_tokens": 5, "stream": True, "ignore_eos": True, **options}
    chunks = data_of((await ask(rack[0], path, body)).body)
    with_usage = [i for i, chunk in enumerate(chunks) if chunk.get("usage") is not None]
    assert with_usage == ([len(chunks) - 1] if asked else [])
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["length"]
    if asked:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("client", PARSERS)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_strict_client_reads_the_stream_whole(rack: Rack, client: str, path: str) -> None:
    body = {"messages": MESSAGES, "prompt": "a b", "max_tokens": 16, "stream": True, "ignore_eos": True}
    # One choice a chunk is how llama.cpp streams several; Spring AI takes an index for a place in the list.
    body |= {"stream_options": {"include_usage": True}, "n": 1 if client in ONE_CHOICE | {"spring_ai"} else 2}
    answer = await ask(rack[0], path, body)
    read = PARSERS[client](answer.body)
    assert (read.finish_reason, read.error) == ("length", None)
    assert read.usage is not None
    if client in ONE_CHOICE:
        assert read.text == text_of(answer.body)
    assert events(answer.body)[-1] == b"data: [DONE]"


@pytest.mark.parametrize(
    "words", [{"n_predict": 100}, {"n_predict": -1}, {"max_tokens": None}, {"max_tokens": 100}, {}]
)
async def test_cap_on_output_holds_whatever_the_client_says(rack: Rack, words: dict[str, Any]) -> None:
    answer = await ask(rack[0], CHAT, {"messages": MESSAGES, "ignore_eos": True, **words})
    assert answer.json["usage"]["completion_tokens"] == 64


async def test_prompt_over_the_context_is_refused_with_the_code_that_clients_test(rack: Rack) -> None:
    for stream in (False, True):
        long = [{"role": "user", "content": "a b c " * CONTEXT_TOKENS}]
        answer = await ask(rack[0], CHAT, {"messages": long, "stream": stream})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_tokens_of_a_text_are_its_text_again(rack: Rack) -> None:
    tokens = (await ask(rack[0], "/tokenize", {"prompt": "abc", "add_special_tokens": False})).json["tokens"]
    assert (await ask(rack[0], "/detokenize", {"tokens": tokens})).json["content"].strip() == "abc"
    assert (await ask(rack[0], "/detokenize", {"tokens": [10**9]})).status == 400
