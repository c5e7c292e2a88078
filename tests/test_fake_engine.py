"""The fake must do what is ordered, else the tests that stand on it prove nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from llamarack.engine.adaptor import LaunchContext
from llamarack.errors import NeverReady
from llamarack.gateway.upstream import get_text
from llamarack.supervise.engine_client import EngineClient, EngineRefused
from llamarack.supervise.warmup import warm_up
from tests.fake_adaptor import FAKE_ENGINE, FakeEngine, fake_spec, flags
from tests.rigs import Engine, fake_engine, until

pytestmark = pytest.mark.process


async def complete(engine: Engine, prompt: str = "x", tokens: int = 5) -> str:
    async with EngineClient(engine.endpoint) as client:
        return (await client.complete(prompt, max_tokens=tokens, timeout_s=20)).text


async def test_warm_up_passes_a_sound_engine_and_refuses_garbage(tmp_path: Path) -> None:
    async with fake_engine(tmp_path, answer_tokens=64) as engine, EngineClient(engine.endpoint) as client:
        assert await warm_up(client, long_prompt_tokens=500, timeout_s=20, has_template=True)
        await engine.order(garbage=True)
        with pytest.raises(NeverReady, match="garbage"):
            await warm_up(client, long_prompt_tokens=500, timeout_s=20, has_template=True)


@pytest.mark.parametrize(("is_long", "requests"), [(False, 2), (True, 3)])
async def test_warm_up_sends_a_long_prompt_only_where_one_is_asked_for(
    tmp_path: Path, is_long: bool, requests: int
) -> None:
    async with (
        fake_engine(tmp_path, spare_requests=requests, refuse=500) as engine,
        EngineClient(engine.endpoint) as client,
    ):
        long_prompt_tokens = 500 if is_long else None
        assert await warm_up(client, long_prompt_tokens=long_prompt_tokens, timeout_s=20, has_template=True)
        with pytest.raises(EngineRefused, match="500"):  # what it spared is used up
            await client.complete("x", max_tokens=1, timeout_s=20)


async def test_warm_up_takes_a_sample_where_the_likeliest_answer_is_bad(tmp_path: Path) -> None:
    async with fake_engine(tmp_path, garbage_requests=2) as engine, EngineClient(engine.endpoint) as client:
        assert await warm_up(client, long_prompt_tokens=None, timeout_s=20, has_template=True)


async def test_spared_requests_meet_no_fault_and_the_next_does(tmp_path: Path) -> None:
    async with fake_engine(tmp_path, spare_requests=2, crash_after=1, crash_with="SIGSEGV") as engine:
        assert [bool(await complete(engine)) for _ in range(2)] == [True, True]
        with pytest.raises(ConnectionError):
            await complete(engine)
        await until(lambda: engine.process.poll() is not None, "it dies")
        assert engine.process.returncode == -signal.SIGSEGV


async def test_load_takes_its_time_and_may_end_in_a_crash_with_a_line(tmp_path: Path) -> None:
    async with fake_engine(tmp_path, wait=False, load_s=3600) as engine, EngineClient(engine.endpoint) as client:
        assert not await client.is_up()
        with pytest.raises(EngineRefused, match="503"):
            await client.complete("x", max_tokens=1, timeout_s=5)
    # Runs to its end by itself; the bound is for a fake that does not.
    argv = [*(sys.executable, "-I", "-S", str(FAKE_ENGINE), "--port", "0"), *flags({"crash_in_load": True})]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=30)  # noqa: ASYNC221
    assert ended.returncode == 1
    assert FakeEngine().diagnose("exit 1", ended.stderr.splitlines()).cause == "load_failed"


async def test_sigterm_is_ignored_where_ordered(tmp_path: Path) -> None:
    async with fake_engine(tmp_path, "deaf", ignore_sigterm=True) as deaf, fake_engine(tmp_path, "sound") as sound:
        for engine in (deaf, sound):
            engine.process.terminate()
        await until(lambda: sound.process.poll() is not None, "the sound one ends")
        assert await complete(deaf)


@pytest.mark.parametrize("own_session", [False, True])
async def test_grandchild_outlives_its_engine_in_the_ordered_session(tmp_path: Path, own_session: bool) -> None:
    fault = "grandchild_setsid" if own_session else "grandchild"
    async with fake_engine(tmp_path, **{fault: True}) as engine:  # type: ignore[arg-type]
        (pid,) = (await engine.record())["grandchildren"]
        try:
            assert (os.getsid(pid) != os.getsid(engine.process.pid)) is own_session
            engine.kill()
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, 0)
        finally:
            os.kill(pid, signal.SIGKILL)


async def test_leak_grows_the_process(tmp_path: Path) -> None:
    def resident_kib(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    async with fake_engine(tmp_path, leak_mib=8) as engine:
        before = resident_kib(engine.process.pid)
        for _ in range(4):
            await complete(engine)
        assert resident_kib(engine.process.pid) - before > 24 * 1024


@pytest.mark.parametrize(("lie", "generated", "running"), [("", 5, 0), ("frozen", 0, 0), ("busy", 5, 1)])
async def test_metrics_say_what_they_are_told_to(tmp_path: Path, lie: str, generated: int, running: int) -> None:
    async with fake_engine(tmp_path, metrics_lie=lie) as engine:
        await complete(engine)
        text = await get_text(engine.endpoint, "/metrics", 10)
        assert text is not None
        counters = FakeEngine().counters(text)
        assert (counters.generated_tokens, counters.running) == (generated, running)


async def test_engine_started_by_its_adaptor_needs_the_key_and_serves_its_model(tmp_path: Path) -> None:
    spec = fake_spec("fake-0", tmp_path, slots=2, context_tokens=1000, answer_tokens=3)
    context = LaunchContext(
        replica=spec.id, model=spec.model, group=spec.group, path=spec.path, candidate=spec.candidate, card_uuids=(),
        files=tmp_path, socket=tmp_path / "engine.sock", key="right",
    )  # fmt: skip
    launch = spec.adaptor.launch(context)
    process = await asyncio.create_subprocess_exec(*launch.argv, env=dict(launch.env))
    try:
        async with EngineClient(launch.endpoint) as client:
            await until(client.is_up, "it is up")
            answer = await client.complete("x", max_tokens=9, timeout_s=20)
            assert answer.completion_tokens == 3
        connector = aiohttp.UnixConnector(path=str(context.socket))
        async with aiohttp.ClientSession(connector=connector) as session:
            wrong = {"Authorization": "Bearer wrong"}
            async with session.post("http://engine/v1/completions", headers=wrong, data=b"{}") as response:
                assert response.status == 401
    finally:
        process.kill()
        await process.wait()
