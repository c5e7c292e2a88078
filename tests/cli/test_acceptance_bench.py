"""The bench step of an acceptance: what a run that is not valid leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llamarack.cli import acceptance_run
from llamarack.cli.acceptance_run import AcceptanceRun, Asked, BenchAsked
from llamarack.cli.started_rack import StartedRack
from llamarack.cli.verify import question_passes
from llamarack.config import parse
from llamarack.judge.acceptance import Outcome
from llamarack.judge.gates import load_gates
from llamarack.measure.result import BenchResult, read_result
from llamarack.paths import rack_paths
from tests.judge.bench_folders import write_bench_folder

RACK = cast(StartedRack, SimpleNamespace(base_url="http://127.0.0.1:1", api_key=None))
DEPLOYMENT = parse("models: [{name: m, path: /m.gguf, gpus: []}]").deployment


def _run(folder: Path) -> AcceptanceRun:
    folder.mkdir()
    asked = Asked(
        file=Path("rack.yaml"),
        whole=DEPLOYMENT,
        deployment=DEPLOYMENT,
        model=DEPLOYMENT.models[0],
        base=None,
        reference=None,
        rules=load_gates("default"),
        gates="default",
        allow=(),
        passes=question_passes("business-en", 1, output_tokens=4),
        bench=BenchAsked(concurrency="1", requests=20, repeat=1, input_tokens=8, output_tokens=4),
        functional=False,
        folder=folder,
        paths=rack_paths("rack", folder / "state"),
    )
    return AcceptanceRun(asked)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[BenchResult]:
    """What the next runs come out with; the first one first."""
    left: list[BenchResult] = []

    async def measured(settings: Any, on_step: Any) -> BenchResult:
        return left.pop(0)

    monkeypatch.setattr(acceptance_run, "run_bench", measured)
    return left


def _valid_and_not(folder: Path) -> tuple[BenchResult, BenchResult]:
    valid = read_result(write_bench_folder(folder, (1.0, 1.0, 1.0)))
    point = replace(valid.points[0], valid=False, invalid_reasons=("the client was late",))
    return valid, replace(valid, valid=False, points=(point,))


async def test_valid_run_is_made_once(tmp_path: Path, results: list[BenchResult]) -> None:
    valid, _ = _valid_and_not(tmp_path / "recorded")
    results += [valid, valid]
    step = await _run(tmp_path / "out")._bench(RACK)
    assert step.outcome is Outcome.PASSED
    assert len(results) == 1
    assert not (tmp_path / "out" / "bench-invalid").exists()


async def test_invalid_run_is_made_once_more_and_kept(tmp_path: Path, results: list[BenchResult], capfd) -> None:
    valid, invalid = _valid_and_not(tmp_path / "recorded")
    results += [invalid, valid]
    step = await _run(tmp_path / "out")._bench(RACK)
    assert step.outcome is Outcome.PASSED
    assert step.details[0] == "measured twice: the first run was invalid: the client was late"
    assert "not valid, so once more: the client was late" in capfd.readouterr().err
    for folder in ("bench", "bench-invalid"):
        assert (tmp_path / "out" / folder / "report.html").exists()
    assert "INVALID" in (tmp_path / "out" / "bench-invalid" / "report.html").read_text()


async def test_second_invalid_run_is_the_answer(tmp_path: Path, results: list[BenchResult]) -> None:
    _, invalid = _valid_and_not(tmp_path / "recorded")
    results += [invalid, invalid, invalid]
    step = await _run(tmp_path / "out")._bench(RACK)
    assert (step.outcome, step.summary) == (Outcome.INCONCLUSIVE, "the run is invalid: the client was late")
    assert len(results) == 1
