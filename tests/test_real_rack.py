"""The whole chain with the real library and the demo model: commands, the official client, cancel, nothing left."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from llamarack.errors import ModelError
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir, rack_paths
from tests.demo_rack import demo_rack
from tests.supervise.conftest import left_of

pytestmark = pytest.mark.llamacpp
DEADLINE_S = 240.0
MESSAGES: Any = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module", autouse=True)
def model() -> Path:
    try:
        return demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("rack")
    with demo_rack(folder, sequences=2) as url:
        yield url
    assert not left_of(folder)


def _command(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LLAMARACK_LOAD_LOCK": str(tmp_path / "lock")}
    return subprocess.run(
        [sys.executable, "-m", "llamarack", *words, "--state-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
        check=False,
    )


def test_demo_once_answers_and_leaves_nothing(tmp_path: Path) -> None:
    done = _command(tmp_path, "demo", "--once", "--prompt", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout  # data on stdout, the rest for people
    # A busy machine may bring all tokens in one piece: then nothing tells how fast they were made.
    assert re.search(r"first token \S+ m?s · (\S+ tokens/s · )?8 tokens", done.stderr)
    assert not left_of(tmp_path)
    # The engine worker and the gateway worker were begun with the command, not after the plan.
    logs = rack_paths("demo", tmp_path).logs
    assert "loaded before it was asked for" in (logs / "smollm2-135m-0.log").read_text()


def test_official_client_streams_and_completes(rack: str) -> None:
    client = openai.OpenAI(base_url=f"{rack}/v1", api_key="none", max_retries=0)
    chunks = list(
        client.chat.completions.create(
            model="smollm2-135m",
            messages=MESSAGES,
            stream=True,
            temperature=0,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    whole = client.completions.create(model="smollm2-135m", prompt="The sky is", max_tokens=4, temperature=0)
    assert whole.choices[0].text.strip()
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]


def test_prompt_over_the_context_is_a_400_that_clients_know(rack: str) -> None:
    client = openai.OpenAI(base_url=f"{rack}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smollm2-135m", prompt="word " * 3000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_frees_the_engines_slot(rack: str, stream: bool) -> None:
    body = {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": stream}

    async def told(session: aiohttp.ClientSession, name: str) -> float:
        async with session.get(f"{rack}/metrics") as response:
            text = await response.text()
        match = re.search(rf"^llamacpp:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert match is not None
        return float(match[1])

    async def running(session: aiohttp.ClientSession) -> float:
        return await told(session, "requests_processing")

    async with aiohttp.ClientSession() as session:
        before = await told(session, "tokens_predicted_total")
        leaving = aiohttp.ClientSession()
        asked = asyncio.ensure_future(leaving.post(f"{rack}/v1/completions", json=body).__aenter__())
        async with asyncio.timeout(DEADLINE_S):
            while await running(session) == 0:
                await asyncio.sleep(0.05)
            asked.cancel()
            if asked.done() and not asked.cancelled():
                asked.result().close()
            await leaving.close()
            while await running(session) > 0:
                await asyncio.sleep(0.05)
        assert await told(session, "tokens_predicted_total") - before < 900  # it did not go on to its end


def test_a_gathered_answer_is_the_engines_own(rack: str) -> None:
    """The same request as it came, since it has a field of the engine's own, and asked as a stream."""
    messages = [{"role": "user", "content": "Name three colours."}]
    for path, asked in (("chat/completions", {"messages": messages}), ("completions", {"prompt": "The sky is"})):
        body = {"model": "smollm2-135m", "max_tokens": 24, "temperature": 0, **asked}
        own, gathered = (_posted(f"{rack}/v1/{path}", body | extra) for extra in ({"timings_per_token": True}, {}))
        assert own["choices"] == gathered["choices"]
        assert own["usage"]["completion_tokens"] == gathered["usage"]["completion_tokens"] > 0
        assert own.keys() == gathered.keys()
        assert own["object"] == gathered["object"]


def _posted(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        value: dict[str, Any] = json.load(response)
    return value


def test_tokenize_and_back(rack: str) -> None:
    client = openai.OpenAI(base_url=rack, api_key="none", max_retries=0)
    answer = client.post("/tokenize", body={"model": "smollm2-135m", "prompt": "The sky is blue"}, cast_to=dict)
    assert answer["count"] == len(answer["tokens"]) == 4
    assert answer["max_model_len"] == 1024
    back = client.post("/detokenize", body={"model": "smollm2-135m", "tokens": answer["tokens"]}, cast_to=dict)
    assert back["prompt"] == "The sky is blue"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_serve_with_its_exit_code_and_nothing_left(model: Path, tmp_path: Path, number: int) -> None:
    environment = {**os.environ, "LLAMARACK_LOAD_LOCK": str(tmp_path / "lock")}
    serving = subprocess.Popen(
        [sys.executable, "-m", "llamarack", "serve", str(model), "--port", "0", "--state-dir", str(tmp_path)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert serving.stderr is not None
    deadline = time.monotonic() + DEADLINE_S
    for line in serving.stderr:
        if "ready after" in line or time.monotonic() > deadline:
            break
    serving.send_signal(number)
    assert serving.wait(60) == 128 + number
    serving.stderr.close()
    assert not left_of(tmp_path)


def test_detached_rack_is_shown_and_stopped(model: Path, tmp_path: Path) -> None:
    assert _command(tmp_path, "serve", str(model), "--port", "0", "--rack", "d", "--detach").returncode == 0
    shown = _command(tmp_path, "status", "--rack", "d")
    assert "ready" in shown.stdout
    again = _command(tmp_path, "serve", str(model), "--port", "0", "--rack", "d")
    assert again.returncode == 2
    assert "already running" in again.stderr
    assert _command(tmp_path, "stop", "--rack", "d").returncode == 0
    assert not left_of(tmp_path)
    gone = _command(tmp_path, "status", "--rack", "d")
    assert gone.returncode == 5
    assert "no rack `d` is running" in gone.stderr
