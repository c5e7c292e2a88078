"""A client that leaves: the engine must see it at once, wherever the request is. Java SDKs repeat timed-out requests,
so a missed cancel multiplies the load."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.raw import ask, chat, connect, get, post_bytes
from tests.rigs import Engine, GatewayRig, fake_engine, gateway_worker, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CHAT = "/v1/chat/completions"


async def counted(gateway: GatewayRig, name: str) -> float:
    """The sum over the labels of one of the gateway's own counters."""
    text = (await get(gateway, "/metrics")).body.decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(sample.value for sample in samples if sample.name == f"llamarack_{name}")


async def newest(engine: Engine, phase: str) -> dict[str, Any] | None:
    requests = await engine.requests()
    return requests[-1] if requests and requests[-1]["phase"] == phase and not requests[-1]["outcome"] else None


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "phase"),
    [("stall_prefill", "prefill"), ("stall_after=2", "decode"), ("token_interval_s=0.05", "decode")],
    ids=["prefill", "silent", "flowing"],
)
async def test_engine_sees_the_client_leave(
    gateway: GatewayRig, engine: Engine, fault: str, phase: str, stream: bool
) -> None:
    cancelled = await counted(gateway, "requests_cancelled_total")
    async with connect(gateway) as client:
        await client.send(post_bytes(CHAT, chat(f"[[fault {fault}]]", stream=stream)))
        await until(lambda: newest(engine, phase), f"it is in {phase}")
        client.leave()
        await until(engine.is_idle, "the engine is told")
    seen = (await engine.requests())[-1]
    assert seen["outcome"] == "left"
    assert seen["tokens"] < 8  # it did not end by itself
    await until(lambda: gateway.counts_of("in_flight") == 0, "the slot is free")
    assert await counted(gateway, "requests_cancelled_total") == cancelled + 1


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_the_queue_never_reaches_the_engine(tmp_path: Path, stream: bool) -> None:
    async with (
        fake_engine(tmp_path, slots=1) as engine,
        gateway_worker(tmp_path, [engine.row()]) as gateway,
        connect(gateway) as first,
    ):
        await first.send(post_bytes(CHAT, chat("[[fault stall_prefill]]")))
        await until(lambda: newest(engine, "prefill"), "the slot is taken")
        async with connect(gateway) as second:
            await second.send(post_bytes(CHAT, chat(stream=stream)))
            await until(lambda: gateway.counts_of("queued") == 1, "it waits")
            second.leave()
            await until(lambda: gateway.counts_of("queued") == 0, "the queue lets it go")
        first.leave()
        assert (await ask(gateway, CHAT, chat())).status == 200
        assert len(await engine.requests()) == 2


async def test_every_client_that_leaves_a_fast_stream_is_counted_as_gone(tmp_path: Path) -> None:
    """A write to a closed connection often comes before the news of its end; it is not the engine that broke."""

    async def leave_in_flow() -> None:
        async with connect(gateway) as client:
            await client.send(post_bytes(CHAT, chat(stream=True)))
            await client.head()
            await anext(client.chunks())
            client.leave()

    async with (
        fake_engine(tmp_path, slots=16, answer_tokens=10**6, token_interval_s=0.0002) as engine,
        gateway_worker(tmp_path, [engine.row()]) as gateway,
    ):
        await asyncio.gather(*(leave_in_flow() for _ in range(48)))
        await until(engine.is_idle, "the engine is told")
        assert {each["outcome"] for each in await engine.requests()} == {"left"}

        async def all_counted() -> bool:
            return await counted(gateway, "requests_cancelled_total") == 48

        await until(all_counted, "all are counted as cancelled")
        assert await counted(gateway, "retries_total") == 0
        assert "engine_broke" not in gateway.log_text()


async def test_half_closed_client_is_one_that_left(gateway: GatewayRig, engine: Engine) -> None:
    async with connect(gateway) as client:
        await client.send(post_bytes(CHAT, chat("[[fault stall_prefill]]")))
        await until(lambda: newest(engine, "prefill"), "it runs")
        client.writer.write_eof()
        await until(engine.is_idle, "the engine is told")


async def test_client_that_leaves_in_its_own_body_leaves_nothing(gateway: GatewayRig, engine: Engine) -> None:
    before = len(await engine.requests())
    logged = len(gateway.log_text())
    async with connect(gateway) as client:
        await client.send(post_bytes(CHAT, chat("x" * 100_000))[:50_000])
        client.leave()
    await until(lambda: " 499 " in gateway.log_text()[logged:], "it is logged as gone")
    assert len(await engine.requests()) == before
    assert "Traceback" not in gateway.log_text()[logged:]
