"""The real llama.cpp behind a real gateway worker: what its streams are like when clients read them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
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


@contextlib.asynccontextmanager
async def tiny_rack(folder: Path, **words: Any) -> AsyncIterator[tuple[GatewayRig, ReplicaRow]]:
    """The real llama.cpp with a tiny model behind a gateway worker. `words`: of the deployment file's group."""
    path = write_tiny_llama(folder / "tiny.gguf", context=CONTEXT_TOKENS)
    told = {"models": [{"name": "tiny", "path": str(path), "gpus": [], **words}]}
    model = parse(json.dumps(told)).deployment.models[0]
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[GatewayRig, ReplicaRow]]:
    async with tiny_rack(tmp_path_factory.mktemp("llamacpp")) as made:
        yield made


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


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2)])
async def test_field_that_the_engine_would_drop_is_refused_by_name(rack: Rack, field: str, value: Any) -> None:
    answer = await ask(rack[0], "/v1/completions", {"prompt": "a", "max_tokens": 2, field: value})
    assert (answer.status, answer.error["param"]) == (400, field)
    assert "llamacpp cannot do this" in answer.error["message"]


async def test_what_the_engine_refuses_names_the_field(rack: Rack) -> None:
    answer = await ask(rack[0], CHAT, {"messages": MESSAGES, "max_tokens": 2, "top_logprobs": 2})
    assert (answer.status, answer.error["param"]) == (400, "top_logprobs")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
    answer = await ask(rack[0], CHAT, {"messages": MESSAGES, "max_tokens": 2, "response_format": schema})
    assert answer.status == 400


async def test_several_choices_stop_texts_and_log_probabilities(rack: Rack) -> None:
    body = {"prompt": "a b", "max_tokens": 3, "n": 2, "logprobs": 2, "ignore_eos": True, "stop": ["zzzz"]}
    answer = (await ask(rack[0], "/v1/completions", body)).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(len(choice["logprobs"]["content"]) == 3 for choice in answer["choices"])


async def test_responses_whole_and_streamed_end_with_their_last_event(rack: Rack) -> None:
    whole = await ask(rack[0], "/v1/responses", {"input": "a b", "max_output_tokens": 4, "store": False})
    assert whole.json["object"] == "response"
    answer = await ask(rack[0], "/v1/responses", {"input": "a b", "max_output_tokens": 4, "stream": True})
    kinds = [event.split(b"\n")[0] for event in events(answer.body)]
    assert kinds[0] == b"event: response.created"
    assert kinds[-1] in {b"event: response.completed", b"event: response.incomplete"}
    assert b"[DONE]" not in answer.body
    kept = await ask(rack[0], "/v1/responses", {"input": "a", "previous_response_id": "resp_1"})
    assert (kept.status, kept.error["param"]) == (400, "previous_response_id")


async def test_embeddings_of_an_engine_without_any_are_a_400_that_names_the_model(rack: Rack) -> None:
    answer = await ask(rack[0], "/v1/embeddings", {"input": "a b"})
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "pooling_type" in answer.error["message"]
    for body, param in (
        ({"input": ""}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
    ):
        answer = await ask(rack[0], "/v1/embeddings", body)
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_azure_paths_are_the_same_endpoints(rack: Rack) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "ignore_eos": True}
    path = "/openai/deployments/tiny/chat/completions?api-version=2024-06-01"
    assert (await ask(rack[0], path, body, api_key="any")).json["usage"]["completion_tokens"] == 2
    assert (await ask(rack[0], "/openai/v1/chat/completions", body)).status == 200
    assert (await ask(rack[0], "/openai/deployments/other/chat/completions", body)).error["code"] == "model_not_found"
