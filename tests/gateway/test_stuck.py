"""A request without progress is given up, and its slot counts as stuck until the engine shows that it is free."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llamarack.supervise.state import State
from tests.gateway.raw import ask, chat, events, get
from tests.gateway.test_metrics import families
from tests.rigs import GatewayRig, fake_engine, gateway_worker, until

pytestmark = pytest.mark.process
CHAT = "/v1/chat/completions"


async def slots(gateway: GatewayRig) -> dict[str, float]:
    found = families((await get(gateway, "/metrics")).body.decode())
    return {labels["state"]: value for labels, value in found["llamarack_slots"]}


@pytest.mark.parametrize("stream", [True, False])
async def test_request_without_progress_is_cancelled_and_its_slot_proven_free(tmp_path: Path, stream: bool) -> None:
    async with (
        fake_engine(tmp_path, slots=2) as engine,
        gateway_worker(tmp_path, [engine.row()], stuck_request_s=1.0) as gateway,
    ):
        answer = await ask(gateway, CHAT, chat("[[fault stall_after=2]]", stream=stream))
        if stream:
            assert events(answer.body)[-1].startswith(b"event: error\n")
            assert b"made no progress for 1 s" in answer.body
        else:
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
            assert answer.headers["x-should-retry"] == "false"
        await until(engine.is_idle, "the engine is told")
        await until(lambda: gateway.counts_of("in_flight") == 0, "the slot is free again")
        assert await slots(gateway) == {"idle": 2, "busy": 0, "stuck": 0}
        page = families((await get(gateway, "/metrics")).body.decode())
        assert page["llamarack_requests_stuck_total"] == [({"model": "fake"}, 1.0)]
        assert (await ask(gateway, CHAT, chat())).status == 200


async def test_slot_stays_stuck_while_the_engine_says_that_it_runs_something(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, slots=2, metrics_lie="busy") as engine,
        gateway_worker(tmp_path, [engine.row()], stuck_request_s=1.0) as gateway,
    ):
        await ask(gateway, CHAT, chat("[[fault stall_prefill]]", stream=True))

        async def is_stuck() -> bool:
            return await slots(gateway) == {"idle": 1, "busy": 0, "stuck": 1}

        await until(is_stuck, "it counts as stuck")
        await until(lambda: gateway.counts_of("stuck") == 1, "the supervisor is told")
        assert gateway.counts_of("in_flight") == 1
        await engine.order(metrics_lie="")
        await until(lambda: gateway.counts_of("in_flight") == 0, "the engine shows that it is free")
        assert gateway.counts_of("stuck") == 0


async def test_stuck_slot_of_an_engine_that_ends_is_free(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, slots=1, metrics_lie="busy") as engine,
        gateway_worker(tmp_path, [engine.row()], stuck_request_s=1.0) as gateway,
    ):
        await ask(gateway, CHAT, chat("[[fault stall_prefill]]", stream=True))
        await until(lambda: gateway.counts_of("stuck") == 1, "it counts as stuck")
        await gateway.set_table([engine.row(State.BACKOFF)])
        async with fake_engine(tmp_path, slots=1) as second:
            await gateway.set_table([second.row()])
            await until(lambda: gateway.counts_of("in_flight") == 0, "its slot went with it")
            assert (await ask(gateway, CHAT, chat())).status == 200


async def test_slow_but_steady_requests_are_not_stuck(tmp_path: Path) -> None:
    """A stream with a token now and then, and a whole answer beside it whose engine makes tokens."""
    async with (
        fake_engine(tmp_path, slots=2, token_interval_s=0.4) as engine,
        gateway_worker(tmp_path, [engine.row()], stuck_request_s=1.5) as gateway,
    ):
        both: Any = await asyncio.gather(*(ask(gateway, CHAT, chat(stream=stream)) for stream in (True, False)))
        assert both[0].body.endswith(b"data: [DONE]\n\n")
        assert both[1].status == 200
