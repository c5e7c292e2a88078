"""A whole run against the golden server, with real worker processes."""

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from llamarack.errors import UsageError
from llamarack.measure.arrivals import Arrivals
from llamarack.measure.point import Level
from llamarack.measure.record import ErrorKind, Phase
from llamarack.measure.result import (
    RECORDS_NAME,
    RESULT_NAME,
    BenchResult,
    json_schema,
    new_folder,
    read_records,
    read_result,
    to_json,
)
from llamarack.measure.run import Step, run_bench
from llamarack.measure.server import Served
from llamarack.measure.settings import Settings, num_requests, num_workers, shares_of
from llamarack.measure.slo import Slo
from llamarack.measure.target import Endpoint, parse_target
from tests.measure.golden_server import GoldenServer, Script, models, no_wait, obedient_script, serving, steps
from tests.measure.test_prompts import SYNTHETIC

SERVED = Served(model="m", endpoint=Endpoint.CHAT, extras=(), has_usage=True, round_trip_s=0.001, notes=())


def settings(folder: Path, port: int = 1, **more) -> Settings:
    base = Settings(
        target=parse_target(f"http://127.0.0.1:{port}"),
        levels=(Level(concurrency=3),),
        folder=folder,
        requests=24,
        input_tokens=16,
        output_tokens=6,
        slo=Slo(first_token_s=30.0),
        timeout_s=30.0,
        seed=5,
    )
    return dataclasses.replace(base, **more)


async def bench(
    folder: Path, script=obedient_script, on_step: Callable[[Step], None] = lambda _: None, **more
) -> tuple[BenchResult, GoldenServer]:
    plain = {"/v1/models": lambda _: models("m"), "/metrics": lambda _: (200, "llamacpp:requests_processing 3\n")}
    server = GoldenServer(scripts={"m": script}, between=no_wait, plain=plain)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with serving(server, listener) as port:
        return await run_bench(settings(folder, port, **more), on_step), server


@pytest.mark.process
async def test_closed_loop_run_counts_exactly_and_keeps_the_level_to_the_end(tmp_path: Path) -> None:
    result, server = await bench(tmp_path, workers=2)
    (point,) = result.points
    records = list(read_records(tmp_path / RECORDS_NAME))
    measured = [record for record in records if record.phase is Phase.MEASURED]
    assert point.requests == len(measured) == 24
    assert point.failures == 0
    assert {record.worker for record in measured} == {0, 1}
    assert (point.input_tokens.min, point.input_tokens.max) == (16, 16)
    assert (point.output_tokens.min, point.output_tokens.max) == (6, 6)
    assert point.output_tokens_per_s is not None
    assert point.goodput is not None
    assert point.goodput.attainment_fraction == 1.0
    assert point.repeats[0].server is not None
    assert point.repeats[0].server.running_max == 3
    assert sum(record.phase is Phase.WARM_UP for record in records) >= 3
    # No prompt was sent twice, and each slot had the next request while its neighbours were still measured.
    prompts = [body["messages"][0]["content"] for body in server.bodies if body["max_tokens"] == 6]
    assert len(set(prompts)) == len(prompts)
    assert result.workload.token_counter == "the server's usage"


@pytest.mark.process
async def test_result_file_is_the_record_and_has_the_stable_keys(tmp_path: Path) -> None:
    result, _ = await bench(tmp_path)
    written = json.loads((tmp_path / RESULT_NAME).read_bytes())
    assert written == json.loads(to_json(result))
    jsonschema.validate(written, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**written, "points": [{}]}, json_schema())
    assert written["schema_version"] == 1
    assert read_result(tmp_path) == result
    assert {"target", "environment", "points"} <= set(written)
    (tmp_path / RESULT_NAME).write_text(json.dumps({**written, "schema_version": 99}))
    with pytest.raises(UsageError, match="schema_version 99"):
        read_result(tmp_path)
    point = written["points"][0]
    assert {"concurrency", "requests", "failures", "valid", "invalid_reasons", "output_tokens_per_s"} <= set(point)
    for metric in ("ttft_s", "per_token_s", "inter_chunk_s", "end_to_end_s"):
        assert {"n", "mean", "p50", "p90", "p95", "p99"} <= set(point["metrics"][metric])
        assert point["metrics"][metric]["p99"] is None or point["metrics"][metric]["n"] >= 299


@pytest.mark.process
async def test_open_loop_run_sends_its_schedule(tmp_path: Path) -> None:
    level = Level(rate_per_s=200.0)
    result, _ = await bench(tmp_path, levels=(level,), arrivals=Arrivals.CONSTANT, requests=60, workers=2)
    (point,) = result.points
    assert point.requests == 60
    assert point.failures == 0
    records = [r for r in read_records(tmp_path / RECORDS_NAME) if r.phase is Phase.MEASURED]
    scheduled = sorted(record.scheduled_monotonic_ns for record in records)
    assert {b - a for a, b in itertools.pairwise(scheduled)} == {5_000_000}
    assert all((record.sent_monotonic_ns or 0) >= record.scheduled_monotonic_ns for record in records)


@pytest.mark.process
async def test_every_failure_is_counted_and_the_run_is_invalid(tmp_path: Path) -> None:
    number = 0

    def every_third_is_cut(body) -> Script:
        nonlocal number
        whole = obedient_script(body)
        if body["max_tokens"] != 6:
            return whole
        number += 1
        return Script(steps=whole.steps[:4], end="fin") if number % 3 == 0 else whole

    result, _ = await bench(tmp_path, every_third_is_cut)
    records = [r for r in read_records(tmp_path / RECORDS_NAME) if r.phase is Phase.MEASURED]
    failed = [record for record in records if record.is_failure]
    assert {record.error_kind for record in failed} == {ErrorKind.TRUNCATED}
    assert result.points[0].failures == len(failed) >= 6
    assert result.points[0].failures_by_kind == {"truncated": len(failed)}
    assert not result.valid
    assert any(reason.startswith("failures") for reason in result.points[0].invalid_reasons)


@pytest.mark.process
async def test_server_that_refuses_the_load_ends_the_level_instead_of_hanging(tmp_path: Path) -> None:
    def refuses(body) -> Script:
        return obedient_script(body) if body["max_tokens"] != 6 else Script(steps=steps(b"{}"), status=503)

    result, _ = await bench(tmp_path, refuses, requests=1000)
    assert not result.valid
    assert result.points[0].requests < 1000


@pytest.mark.process
async def test_interrupted_run_returns_what_it_has(tmp_path: Path) -> None:
    task: asyncio.Task[None] | None = None

    def interrupt(step: Step) -> None:
        if step.number == 1 and step.progress is not None and step.progress.finished >= 5:
            assert task is not None
            task.cancel()

    outcome: list[BenchResult] = []

    async def run() -> None:
        outcome.append(
            (await bench(tmp_path, on_step=interrupt, levels=(Level(concurrency=1), Level(concurrency=3))))[0]
        )

    task = asyncio.create_task(run())
    await task
    (result,) = outcome
    assert result.is_interrupted
    assert not result.valid
    assert [point.concurrency for point in result.points] == [1, 3]
    assert result.points[0].valid or "interrupted before its end" not in result.points[0].invalid_reasons
    assert "interrupted before its end" in result.points[1].invalid_reasons
    assert (tmp_path / RESULT_NAME).exists()


@pytest.mark.process
async def test_questions_run_has_no_fixed_length_and_repeats_are_interleaved(tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    levels = (Level(concurrency=1), Level(concurrency=2))
    result, _ = await bench(
        tmp_path,
        on_step=lambda step: seen.append((step.repeat, step.level.concurrency)) if step.progress is None else None,
        levels=levels,
        prompts="business-zh",
        repeats=2,
        requests=20,
    )
    assert seen == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert not result.workload.is_fixed_length
    assert [len(point.repeats) for point in result.points] == [2, 2]
    assert [point.requests for point in result.points] == [40, 40]


@pytest.mark.process
async def test_prompt_shorter_than_the_template_is_refused_before_any_load(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="template alone takes 5") as caught:
        await bench(tmp_path, input_tokens=5)
    assert caught.value.hint == "--input-tokens 38"


def test_requests_default_to_thirty_or_ten_a_slot(tmp_path: Path) -> None:
    unset = settings(tmp_path, requests=None)
    assert [num_requests(unset, Level(concurrency=c)) for c in (1, 3, 8)] == [30, 30, 80]
    assert num_requests(unset, Level(rate_per_s=2.0)) == 30


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_shares_add_up_to_the_level(tmp_path: Path, workers: int) -> None:
    asked = settings(tmp_path, requests=47, workers=workers)
    level = Level(concurrency=7)
    shares = shares_of(asked, SERVED, SYNTHETIC, True, level, 0, 0)
    loops = [share.loop for share in shares]
    assert sum(getattr(loop, "slots", 0) for loop in loops) == 7
    assert sum(loop.requests or 0 for loop in loops) == 47
    assert len(shares) == num_workers(asked, level) == workers


def test_no_worker_is_without_a_slot(tmp_path: Path) -> None:
    assert num_workers(settings(tmp_path, workers=8), Level(concurrency=2)) == 2


@pytest.mark.parametrize(("text", "match"), [("{}", "target: "), ("[", "no bench result"), (None, "No such file")])
def test_file_that_is_no_result_is_refused_with_the_reason(tmp_path: Path, text: str | None, match: str) -> None:
    if text is not None:
        (tmp_path / RESULT_NAME).write_text(text)
    with pytest.raises(UsageError, match=match):
        read_result(tmp_path)


def test_folder_with_a_run_is_not_used_again(tmp_path: Path) -> None:
    assert new_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / RECORDS_NAME).write_text("")
    with pytest.raises(UsageError, match="holds a run already"):
        new_folder(tmp_path)


def test_record_line_cut_off_by_a_kill_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / RECORDS_NAME
    path.write_bytes(b'{"half": ')
    assert list(read_records(path)) == []
    assert list(read_records(tmp_path / "none")) == []
