"""The short form; `benchmarks/fuzz_api.py` is the long one."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.gateway.fuzzing import fuzz, one
from tests.gateway.malformed import request
from tests.gateway.raw import chat, post_bytes
from tests.rigs import fake_engine, gateway_in_process, gateway_worker, until

pytestmark = pytest.mark.process
COUNT = 5_000
SEED = 20260830
_MIB = 1024**2


async def test_malformed_requests_make_no_fault_and_leave_nothing(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, slots=32, answer_tokens=2) as engine,
        gateway_worker(tmp_path, [engine.row()]) as gateway,
    ):
        report = await fuzz(gateway, engine, seed=SEED, count=COUNT)
    assert report.failures == []
    assert report.sent == COUNT
    assert {200, 400, 404, 405} <= set(report.statuses)  # it reached all kinds of answers
    assert max(report.open_files) - min(report.open_files) <= 2  # a connection to the engine may just be closing
    # The first fifth fills caches and arenas.
    assert report.resident_bytes[-1] - report.resident_bytes[2] < 4 * _MIB


async def test_malformed_and_abandoned_requests_leave_no_task(tmp_path: Path) -> None:
    async with fake_engine(tmp_path, slots=4, answer_tokens=2) as engine, gateway_in_process([engine.row()]) as gateway:
        before = asyncio.all_tasks()
        for part in range(8):
            malformed = [request(random.Random(f"tasks {part} {i}")) for i in range(32)]
            # Left in the queue, in prefill, and in silence after two tokens.
            abandoned = [
                post_bytes("/v1/chat/completions", chat(f"[[fault {fault}]]", stream=stream))
                for fault in ("stall_prefill", "stall_after=2", "prefill_s=0.1")
                for stream in (True, False)
            ]
            await asyncio.gather(*(one(gateway, raw) for raw in malformed + abandoned))
        await until(engine.is_idle, "the engine is idle")
        await until(lambda: asyncio.all_tasks() <= before, "no task is left")
