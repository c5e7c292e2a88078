"""An engine dies under load: what had not begun to stream goes elsewhere unseen, the rest is told."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarack.supervise.state import State
from tests.gateway.raw import Answer, ask, chat, events, get
from tests.rigs import fake_engine, gateway_worker, until

pytestmark = pytest.mark.process
CHAT = "/v1/chat/completions"


FAULTS = ["crash_after=0", "close_after=0", "reset_after=0", "refuse=503", "crash_after=0 crash_with=SIGSEGV"]


async def test_request_whose_engine_breaks_before_the_first_event_is_answered_by_another(tmp_path: Path) -> None:
    async with fake_engine(tmp_path, "good") as good, gateway_worker(tmp_path, [good.row()]) as gateway:
        for number, fault in enumerate(FAULTS):
            words: dict[str, Any] = dict(word.split("=") for word in fault.split())
            async with fake_engine(tmp_path, f"bad-{number}", **words) as bad:
                await gateway.set_table([bad.row(), good.row()])
                answers = [await ask(gateway, CHAT, chat(stream=i % 2 == 0)) for i in range(4)]
                assert [answer.status for answer in answers] == [200] * 4, fault
                for answer in answers[::2]:
                    assert answer.body.endswith(b"data: [DONE]\n\n"), fault
                    assert b"event: error" not in answer.body, fault
                assert f"replica=bad-{number}" in gateway.log_text()
                assert len(await good.requests()) == 4 * (number + 1)
        await until(lambda: gateway.counts_of("in_flight") == 0, "all slots are free")


async def test_server_whose_engine_is_dead_is_never_the_clients_fault(tmp_path: Path) -> None:
    """vLLM's HTTP server outlives its engine by a second or two, and answers every request with a 500 or an event."""
    words = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    dead: dict[str, Any] = {"flavor": "vllm", "error_after": 0, "error_message": words}
    async with (
        fake_engine(tmp_path, "good", flavor="vllm") as good,
        fake_engine(tmp_path, "dead", **dead) as engine,
        fake_engine(tmp_path, "later", **(dead | {"error_after": 3})) as later,
        gateway_worker(tmp_path, [good.row()]) as gateway,
    ):
        await gateway.set_table([engine.row(), good.row()])
        answers = [await ask(gateway, CHAT, chat(stream=i % 2 == 0)) for i in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert not [answer for answer in answers if b"error" in answer.body]
        assert len(await good.requests()) == 4
        await gateway.set_table([later.row()])
        told = events((await ask(gateway, CHAT, chat(stream=True))).body)[-1]
        assert b"broke off after" in told
        assert b"upstream_failed" in told
        await gateway.set_table([replace(engine.row(), engine="llamacpp")])  # whose words these are not
        assert b"See stack trace" in (await ask(gateway, CHAT, chat())).body


async def test_engine_that_does_not_know_our_key_is_never_the_clients_fault(tmp_path: Path) -> None:
    """A socket outlives an engine: behind it may be its next life, with another key."""
    async with (
        fake_engine(tmp_path, "a") as a,
        fake_engine(tmp_path, "b") as b,
        gateway_worker(tmp_path, [b.row()], max_queue_s=1) as gateway,
    ):
        stale = replace(a.row(), endpoint=replace(a.endpoint, key="of its former life"))
        await gateway.set_table([stale, b.row()])
        assert [(await ask(gateway, CHAT, chat(stream=i % 2 == 0))).status for i in range(4)] == [200] * 4
        await gateway.set_table([stale])
        assert (await ask(gateway, CHAT, chat())).status in {502, 503}


async def test_engines_that_never_had_the_request_cost_it_no_attempt(tmp_path: Path) -> None:
    """More replicas than attempts are dead and still called ready, or answer for another engine."""
    async with (
        fake_engine(tmp_path, "good") as good,
        fake_engine(tmp_path, "other", refuse=503) as other,
        gateway_worker(tmp_path, [good.row()]) as gateway,
    ):
        dead = []
        for number in range(6):
            async with fake_engine(tmp_path, f"dead-{number}") as engine:
                dead.append(engine.row())
        busy = asyncio.create_task(ask(gateway, CHAT, chat("[[fault prefill_s=3]]")))
        await until(good.requests, "the good one is the fullest, so that all others are asked before it")
        await gateway.set_table([*dead, other.row(), good.row()])
        for number, stream in enumerate((False, True), 1):
            answer = await ask(gateway, CHAT, chat(stream=stream))
            assert answer.status == 200
            assert b"error" not in answer.body
            assert gateway.log_text().count("engine_broke") == 7 * number
        assert (await busy).status == 200


async def test_request_over_which_engines_break_is_given_up_after_four(tmp_path: Path) -> None:
    async with fake_engine(tmp_path, "good") as good, gateway_worker(tmp_path, [good.row()]) as gateway:
        text = "[[fault close_after=0]]"  # goes with the request, wherever that goes
        async with (
            fake_engine(tmp_path, "a") as a,
            fake_engine(tmp_path, "b") as b,
            fake_engine(tmp_path, "c") as c,
            fake_engine(tmp_path, "d") as d,
        ):
            engines = [a, b, c, d, good]
            await gateway.set_table([engine.row() for engine in engines])
            answer = await ask(gateway, CHAT, chat(text))
            assert (answer.status, answer.error["code"]) == (502, "upstream_failed")
            assert sum([len(await engine.requests()) for engine in engines]) == 4


async def test_request_is_not_repeated_after_its_first_event(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, "a") as a,
        fake_engine(tmp_path, "b") as b,
        gateway_worker(tmp_path, [a.row(), b.row()]) as gateway,
    ):
        answer = await ask(gateway, CHAT, chat("[[fault close_after=1]]", stream=True))
        assert events(answer.body)[-1].startswith(b"event: error\n")
        assert len(await a.requests()) + len(await b.requests()) == 1


async def test_whole_answer_is_repeated_even_when_tokens_were_made(tmp_path: Path) -> None:
    """Nothing of it was passed on."""
    async with (
        fake_engine(tmp_path, "a", close_after=3) as a,
        fake_engine(tmp_path, "b") as b,
        gateway_worker(tmp_path, [a.row(), b.row()]) as gateway,
    ):
        answers = [await ask(gateway, CHAT, chat()) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        assert len(await a.requests()) >= 1
        assert len(await b.requests()) == 2


async def test_kill_under_load_loses_only_what_had_streamed(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, "a", slots=4, token_interval_s=0.05) as a,
        fake_engine(tmp_path, "b", slots=4, token_interval_s=0.05) as b,
        gateway_worker(tmp_path, [a.row(), b.row()]) as gateway,
    ):
        # Eight run at once, of which those on `a` that are in prefill have passed nothing on; eight wait.
        texts = ["[[fault prefill_s=1]]", "[[fault prefill_s=1]]", "", ""] * 4  # `a` and `b` in turn
        asked = [asyncio.create_task(ask(gateway, CHAT, chat(text, stream=True))) for text in texts]

        async def both_kinds() -> bool:
            phases = [each["phase"] for each in await a.requests() if not each["outcome"]]
            return len(phases) == 4 and {"prefill", "decode"} <= set(phases)

        await until(both_kinds, "`a` has some in prefill and some that stream")
        running = [each for each in await a.requests() if not each["outcome"]]
        a.kill()
        await gateway.set_table([a.row(State.BACKOFF), b.row()])
        answers = await asyncio.gather(*asked)
    lost = [answer for answer in answers if events(answer.body)[-1].startswith(b"event: error\n")]
    whole = [answer for answer in answers if answer.body.endswith(b"data: [DONE]\n\n")]
    assert len(lost) + len(whole) == 16
    # Those in prefill may have begun to stream between the look and the kill, and those that streamed may have ended.
    assert len(lost) <= len(running)
    assert lost
    assert all(len(events(answer.body)) > 1 for answer in lost)


async def test_models_are_listed_while_replicas_are_down(tmp_path: Path) -> None:
    async with fake_engine(tmp_path) as engine, gateway_worker(tmp_path, [engine.row()]) as gateway:
        engine.kill()
        for state in (State.READY, State.BACKOFF, State.FAILED):
            await gateway.set_table([engine.row(state)])
            answer = await get(gateway, "/v1/models")
            assert answer.status == 200
            (model,) = answer.json["data"]
            assert {"id": "fake", "object": "model", "owned_by": "llamarack"}.items() <= model.items()
            assert isinstance(model["created"], int)
            assert model["max_model_len"] == engine.context_tokens
        assert (await get(gateway, "/live")).status == 200
        refused = await ask(gateway, CHAT, chat())
        assert (refused.status, refused.error["code"]) == (503, "model_not_ready")
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        health = await get(gateway, "/health")
        assert health.status == 503
        assert health.json["models_not_ready"] == ["fake"]


async def test_all_replicas_dead_but_still_called_ready_end_in_502_and_not_in_a_hang(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, close_after=0) as engine,
        gateway_worker(tmp_path, [engine.row()], max_queue_s=1) as gateway,
    ):
        answer: Answer = await ask(gateway, CHAT, chat())
        assert answer.status in {502, 503}
        assert "retry-after" in answer.headers


async def test_replica_started_anew_takes_the_request_that_its_former_life_lost(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, "a", stall_prefill=True) as first,
        gateway_worker(tmp_path, [first.row()]) as gateway,
    ):
        asked = asyncio.create_task(ask(gateway, CHAT, chat(stream=True)))
        await until(first.requests, "the engine has it")
        first.kill()
        await gateway.set_table([first.row(State.BACKOFF)])
        async with fake_engine(tmp_path, "a") as second:
            await gateway.set_table([second.row()])
            answer = await asked
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert len(await second.requests()) == 1
