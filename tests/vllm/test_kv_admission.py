"""Admission by tokens before the real vLLM: a cache too small for all that come, with and without it.

Requests name a large limit and end by themselves long before it. Sent straight to the engine they are taken as long as
there are sequences, and some are thrown out of the cache half way and computed again. Through the gateway they wait
until there is room for what such requests really use: hardly any is thrown out, and the cache is full all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llamarack.config import parse
from llamarack.engine.adaptor import LaunchContext
from llamarack.engine.dialect import Endpoint
from llamarack.engine.vllm import Vllm
from llamarack.gateway.upstream import get_text
from llamarack.supervise.engine_client import EngineClient
from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow
from tests.fake_adaptor import fake_candidate
from tests.gateway.test_metrics import families
from tests.rigs import gateway_worker
from tests.vllm.conftest import EAGER, START_TIMEOUT_S

pytestmark = pytest.mark.vllm
CONTEXT_TOKENS, SEQUENCES = 1024, 16
# SmolLM2-135M: 30 layers, 3 KV heads of 64, keys and values in bfloat16: 23,040 bytes a token. vLLM's pages on the
# processor hold 128 tokens.
KV_BYTES = 16 * 128 * 23_040
AT_ONCE = int(os.environ.get("LLAMARACK_KV_AT_ONCE", "16"))
REQUESTS = int(os.environ.get("LLAMARACK_KV_REQUESTS", "40"))
SUBJECTS = ("a lighthouse", "rain", "an old clock", "bread", "a river", "winter", "a library", "two brothers")


@contextlib.asynccontextmanager
async def engine(folder: Path, weights: Path, python: Path) -> AsyncIterator[ReplicaRow]:
    limits = {"context_tokens": CONTEXT_TOKENS, "sequences": SEQUENCES, "batch_tokens": 512, "kv_cache_bytes": KV_BYTES}
    # Without its prefix cache a preempted sequence is computed again whole, as distinct prompts would have it.
    told: dict[str, Any] = {
        "name": "m",
        "path": str(weights),
        "engine": "vllm",
        "gpus": [],
        "engine_python": str(python),
    }
    told |= {"limits": limits | {"threads": 1}, "engine_args": EAGER | {"no-enable-prefix-caching": True}}
    model = parse(json.dumps({"models": [told]})).deployment.models[0]
    context = LaunchContext(
        replica="m-0", model=model, group=model.groups[0], path=weights,
        candidate=fake_candidate(SEQUENCES, CONTEXT_TOKENS), card_uuids=(), files=folder,
        socket=folder / "e.sock", key="key",
    )  # fmt: skip
    launch = Vllm().launch(context)
    row = ReplicaRow(
        id="m-0", model="m", engine="vllm", state=State.READY, endpoint=launch.endpoint, slots=SEQUENCES,
        context_tokens=CONTEXT_TOKENS,
    )  # fmt: skip
    with (folder / "engine.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*launch.argv, env=dict(launch.env), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        async with EngineClient(launch.endpoint) as client:
            while not await client.is_up():
                assert process.returncode is None, (folder / "engine.log").read_text()[-3000:]
                assert time.monotonic() < deadline, "it does not come up"
                await asyncio.sleep(1)
        yield row
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 60)
        except TimeoutError:
            process.kill()
            await process.wait()


async def seen(endpoint: Endpoint) -> tuple[float, float]:
    """Preemptions so far, and how full the cache is."""
    found = families(await get_text(endpoint, "/metrics", 30) or "")
    preempted = sum(value for _, value in found.get("vllm:num_preemptions_total", []))
    return preempted, max((value for _, value in found.get("vllm:kv_cache_usage_perc", [])), default=0.0)


async def load(session: aiohttp.ClientSession, url: str, endpoint: Endpoint) -> dict[str, Any]:
    """All requests, so many at once; what became of them, and how the cache did meanwhile."""
    numbers = iter(range(REQUESTS))
    made: list[int] = []
    used: list[float] = []

    async def client() -> None:
        for number in numbers:
            subject = SUBJECTS[number % len(SUBJECTS)]
            question = f"Number {number}: tell me something about {subject}."
            body = {"model": "m", "messages": [{"role": "user", "content": question}], "temperature": 0.0}
            # 700 are allowed; it ends with the first sentence after 40 to 119 tokens.
            body |= {"max_tokens": 700, "min_tokens": 40 + number * 37 % 80, "stop": ["."], "repetition_penalty": 1.2}
            async with session.post(url, json=body, headers={"Authorization": "Bearer key"}) as answer:
                value = await answer.json()
                assert answer.status == 200, value
                made.append(value["usage"]["completion_tokens"])

    async def watch() -> None:
        while True:
            used.append((await seen(endpoint))[1])
            await asyncio.sleep(1)

    before, started = (await seen(endpoint))[0], time.monotonic()
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    seconds = time.monotonic() - started
    watching.cancel()
    middle = sorted(used[len(used) // 4 : -len(used) // 4] or used)
    return {
        "requests": len(made),
        "preemptions": (await seen(endpoint))[0] - before,
        "tokens": sum(made),
        "longest": max(made),
        "tokens_per_s": round(sum(made) / seconds, 1),
        "cache_used_median": round(middle[len(middle) // 2], 2),
    }


async def test_admission_keeps_preemption_rare_and_the_cache_full(
    tmp_path: Path, vllm_python: Path, smollm2: Path
) -> None:
    timeout = aiohttp.ClientTimeout(total=1800)
    async with engine(tmp_path, smollm2, vllm_python) as row:
        assert row.endpoint is not None
        straight = aiohttp.UnixConnector(path=str(row.endpoint.socket), limit=0)
        async with aiohttp.ClientSession(connector=straight, timeout=timeout) as session:
            without = await load(session, "http://engine/v1/chat/completions", row.endpoint)
        settings: dict[str, Any] = {"max_queue_requests": 400, "max_queue_s": 1800, "request_timeout_s": 1800}
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            gateway_worker(tmp_path, [row], **settings) as gateway,
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        ):
            # The first ones teach it what an answer takes; before, each counts as much as it may take.
            first = await load(session, f"{gateway.url}/v1/chat/completions", row.endpoint)
            within = await load(session, f"{gateway.url}/v1/chat/completions", row.endpoint)
    print(json.dumps({"without": without, "first": first, "with": within}))
    assert without["preemptions"] >= 3, "the cache is too large to show anything"
    assert first["preemptions"] < without["preemptions"] / 2
    assert within["preemptions"] < without["preemptions"] / 2
    assert within["cache_used_median"] >= 0.4  # of what is reserved, sequences fill some two thirds as they grow
