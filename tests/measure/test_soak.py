"""A soak: what is judged, and the command against real servers with and without faults."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llamarack.errors import ModelError
from llamarack.measure.prompts import FromFile, load_questions
from llamarack.measure.server import Served
from llamarack.measure.soak import Asked, Look, Soak, SoakSettings
from llamarack.measure.soak_result import SoakResult, json_schema, soak_result, to_json
from llamarack.measure.target import Endpoint, parse_target
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from llamarack.report.soak import soak_html
from llamarack.units import GIB, MIB
from tests.rigs import fake_engine, gateway_worker
from tests.supervise.conftest import own_load_lock  # noqa: F401 - fixture

HOUR_S = 3600.0
DEADLINE_S = 120.0


def _settings(duration_s: float = HOUR_S) -> SoakSettings:
    served = Served(model="m", endpoint=Endpoint.CHAT, extras=(), has_usage=True, round_trip_s=0.001, notes=())
    return SoakSettings(
        target=parse_target("http://127.0.0.1:1"),
        served=served,
        prompts=FromFile(name="business-en", questions=load_questions("business-en"), seed=1),
        duration_s=duration_s,
        concurrency=4,
        output_tokens=64,
        sample_s=10,
    )


def _good() -> Soak:
    """An hour of a sound server: 1,200 requests, 360 looks."""
    chance = random.Random(1)
    soak = Soak(started_unix_s=1_000_000, lasted_s=HOUR_S, probes=36_000)
    soak.requests = [
        Asked(ended_s=3.0 * i, first_token_s=0.1, duration_s=1.1 + chance.gauss(0, 0.05), tokens=51, error=None)
        for i in range(1200)
    ]
    soak.looks = [
        Look(
            at_s=10.0 * i,
            memory_bytes={"replica a-0": int(2 * GIB + chance.gauss(0, MIB)), "host": 9 * GIB},
            slots_idle=4,
            slots_total=8,
            restarts=1,
        )
        for i in range(360)
    ]
    return soak


def _judge(soak: Soak) -> SoakResult:
    return soak_result(soak, _settings())


def test_sound_hour_is_go() -> None:
    result = _judge(_good())
    assert (result.verdict, result.reasons, result.exit_code) == ("GO", (), 0)
    assert (result.requests, result.failures, result.restarts) == (1200, 0, 0)
    assert result.tokens_per_s == pytest.approx(1200 * 51 / 3600)
    assert result.drift_fraction == pytest.approx(0, abs=0.05)
    jsonschema.validate(json.loads(to_json(result)), json_schema())
    page = soak_html(result)
    assert "GO" in page
    assert "src=" not in page  # nothing from anywhere else


def test_leak_is_no_go_also_when_it_is_slow() -> None:
    soak = _good()
    soak.looks = [
        replace(look, memory_bytes={**look.memory_bytes, "card 0": 60 * GIB + int(look.at_s * 10_000)})
        for look in soak.looks
    ]
    result = _judge(soak)
    assert (result.verdict, result.exit_code) == ("NO-GO", 6)
    assert "card 0: memory grows by 34.3 MiB an hour" in result.reasons[0]


def test_memory_of_others_on_the_host_is_shown_and_not_held_against_it() -> None:
    soak = _good()
    soak.looks = [
        replace(look, memory_bytes={**look.memory_bytes, "host": 9 * GIB + int(look.at_s * MIB)}) for look in soak.looks
    ]
    result = _judge(soak)
    assert result.verdict == "GO"
    assert next(curve for curve in result.memory if curve.name == "host").leak_bytes_per_h is not None


def test_failures_restarts_out_of_memory_drift_and_pauses_are_no_go() -> None:
    soak = _good()
    soak.requests[5] = replace(soak.requests[5], error="connect: refused")
    assert "1 requests failed, the first with `connect: refused`" in _judge(soak).reasons[0]
    soak = _good()
    soak.looks[-1] = replace(soak.looks[-1], restarts=3)
    assert _judge(soak).reasons == ("engines were started again 2 times",)
    soak = _good()
    soak.events["died host_out_of_memory"] = 2
    assert _judge(soak).reasons == ("out of memory 2 times",)
    soak = _good()
    soak.requests = [replace(each, duration_s=each.duration_s * (1 + each.ended_s / HOUR_S)) for each in soak.requests]
    assert "longer at the end than at the start" in _judge(soak).reasons[0]
    soak = _good()
    soak.stalls_s = [(float(i), 0.3) for i in range(50)]
    assert "50 pauses of the server beyond 100 ms, the longest 300 ms" in _judge(soak).reasons[0]


def test_what_proves_nothing_is_inconclusive() -> None:
    soak = _good()
    soak.lasted_s = 1800
    assert _judge(soak).exit_code == 7
    soak = _good()
    soak.requests = soak.requests[:29]
    assert _judge(soak).verdict == "INCONCLUSIVE"
    soak = _good()
    soak.looks = soak.looks[::10]
    assert "too few for a trend" in _judge(soak).reasons[0]


async def _soak_command(*words: str) -> tuple[int, dict[str, Any], str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llamarack", "soak", *words, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, json.loads(out) if out else {}, errors.decode()


@pytest.mark.process
async def test_command_against_a_sound_server_is_go(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, token_interval_s=0.005) as engine,
        gateway_worker(tmp_path, [engine.row()]) as gateway,
    ):
        options = ("--hours", "0.002", "--concurrency", "2", "-o", str(tmp_path / "soak"))
        code, record, errors = await _soak_command(gateway.url, *options)
    assert record["failures"] == 0, errors
    assert record["requests"] > 30
    assert record["stalls"]["probes"] > 10
    if not record["stalls"]["count"]:  # of a machine that others load
        assert (code, record["verdict"]) == (0, "GO")
    assert (tmp_path / "soak/soak.html").exists()
    assert json.loads((tmp_path / "soak/soak.json").read_bytes()) == record


@pytest.mark.process
async def test_command_against_a_server_that_breaks_off_is_no_go(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, spare_requests=8, error_after=2) as engine,
        gateway_worker(tmp_path, [engine.row()]) as gateway,
    ):
        options = ("--hours", "0.001", "--concurrency", "2", "-o", str(tmp_path / "soak"))
        code, record, _ = await _soak_command(gateway.url, *options)
    assert (code, record["verdict"]) == (6, "NO-GO")
    assert record["failures"] > 0
    assert record["errors"]


@pytest.mark.process
async def test_interrupted_soak_leaves_its_report(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, token_interval_s=0.01) as engine,
        gateway_worker(tmp_path, [engine.row()]) as gateway,
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llamarack", "soak", gateway.url, "--hours", "24", "-o", str(tmp_path / "soak")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        async with asyncio.timeout(DEADLINE_S):
            while not [each for each in await engine.requests() if each["outcome"] == "done"]:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        process.send_signal(signal.SIGINT)
        out, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 130
    assert b"INCONCLUSIVE" in out
    assert b"of 24" in out
    assert (tmp_path / "soak/soak.html").exists()


@pytest.mark.llamacpp
async def test_file_is_served_meanwhile_watched_and_stopped_again(tmp_path: Path) -> None:
    try:
        model = demo_model(cache_dir(), print)  # answers of random weights are refused at warm-up
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    file = tmp_path / "tiny.yaml"
    limits = "{context_tokens: 256, sequences: 2, threads: 1}"
    file.write_text(f"models: [{{name: tiny, path: {model}, gpus: [], limits: {limits}}}]\ngateway: {{port: 0}}\n")
    options = ("--hours", "0.003", "--concurrency", "2", "--sample", "0.1", "--output-tokens", "16")
    where = ("--state-dir", str(tmp_path / "s"), "-o", str(tmp_path / "soak"))
    _, record, errors = await _soak_command(str(file), *options, *where)
    assert record, errors
    assert record["failures"] == 0
    assert "replica tiny-0" in [curve["name"] for curve in record["memory"]]
    assert record["slots_total"] == 2
    assert record["slots_idle_min"] in (0, 1, 2)
    assert record["restarts"] == 0
    rack = tmp_path / "soak/rack"  # of its own, beside the report
    assert (rack / "serve.log").exists()
    assert not (rack / "racks/started/state.json").exists()  # stopped in order


@pytest.mark.process
async def test_what_is_neither_file_nor_url_is_refused(tmp_path: Path) -> None:
    code, _, errors = await _soak_command(str(tmp_path / "none.yaml"), "-o", str(tmp_path / "soak"))
    assert code == 2
    assert not (tmp_path / "soak").exists()
    assert "neither a URL nor a file" in errors
