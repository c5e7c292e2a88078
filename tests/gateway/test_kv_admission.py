"""Admission by tokens against an engine whose sequences share one KV cache: soon as much as fits, and hardly more."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.raw import ask, chat, get
from tests.gateway.test_metrics import families
from tests.rigs import GatewayRig, fake_engine, gateway_worker, until

pytestmark = pytest.mark.process
CHAT = "/v1/chat/completions"
KV_TOKENS = 800
# 20 words of prompt as the fake engine counts them, and 40 tokens of answer.
WORDS = " ".join(f"word{i}" for i in range(12))


async def pool(gateway: GatewayRig) -> list[tuple[dict[str, str], float]]:
    return families((await get(gateway, "/metrics")).body.decode()).get("llamarack_kv_overcommit", [])


async def test_requests_that_name_a_large_limit_share_the_cache_by_what_they_use(tmp_path: Path) -> None:
    async with (
        fake_engine(
            tmp_path, flavor="vllm", slots=64, answer_tokens=40, kv_tokens=KV_TOKENS, token_interval_s=0.005
        ) as engine,
        gateway_worker(tmp_path, [engine.row()], max_queue_requests=400, max_queue_s=100) as gateway,
    ):
        await until(lambda: pool(gateway), "the gateway knows the cache's size")
        body: dict[str, Any] = chat(WORDS, max_tokens=4000, stream=True)
        # Each asks for 4,000 tokens: until the gateway has seen what they use, they go one after the other.
        first = await asyncio.gather(*(ask(gateway, CHAT, body) for _ in range(24)))
        before = await engine.record()
        rest = await asyncio.gather(*(ask(gateway, CHAT, body) for _ in range(160)))
        after = await engine.record()
    assert {answer.status for answer in [*first, *rest]} == {200}
    assert before["max_kv_used"] <= KV_TOKENS
    assert after["max_running"] >= 5
    assert after["max_kv_used"] >= 0.5 * KV_TOKENS  # not wasted on tokens that nobody uses
    assert after["max_kv_used"] <= 1.1 * KV_TOKENS  # a step too far at most
