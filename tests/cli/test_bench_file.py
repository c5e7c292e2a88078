"""`bench FILE` on the real engine: started, measured beside its plan, stopped; or measured as it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamarack.cli.bench import _learn, require_target
from llamarack.errors import ModelError, UsageError
from llamarack.measure.result import read_result
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from llamarack.plan.calibration import Calibration
from tests.supervise.conftest import left_of

DEADLINE_S = 300.0
SMALL = ["--concurrency", "1,2", "--requests", "20", "--input-tokens", "48", "--output-tokens", "8"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    try:
        model = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    path = tmp_path / "bench-me.yaml"
    limits = "{context_tokens: 512, sequences: 2, threads: 1}"
    path.write_text(
        f"models:\n  - {{name: m, path: {model}, gpus: [], limits: {limits}}}\ngateway: {{port: 0, max_queue_s: 300}}\n"
    )
    return path


def _run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LLAMARACK_LOAD_LOCK": str(tmp_path / "lock")}
    environment |= {"LLAMARACK_STATE_DIR": str(tmp_path / "state")}
    return subprocess.run(
        [sys.executable, "-m", "llamarack", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
        check=False,
    )


def _lessons(tmp_path: Path) -> list[Any]:
    path = tmp_path / "state" / "calibration.json"
    return json.loads(path.read_text())["calibrations"] if path.exists() else []


@pytest.mark.llamacpp
def test_file_that_is_not_running_is_started_measured_and_stopped(file: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, "bench", str(file), *SMALL, "-o", str(tmp_path / "run"), "--json")
    assert done.returncode in (0, 7), done.stderr  # 7: a machine too busy to measure on
    assert "it is started for this measurement" in done.stderr
    result = read_result(tmp_path / "run")
    assert json.loads(done.stdout)["target"]["model"] == "m"
    assert [(point.requests, point.failures) for point in result.points] == [(20, 0), (20, 0)]
    (series,) = result.memory
    assert series.name == "m-0, host memory"
    assert min(series.used_bytes) > 50_000_000  # the model's own size is 98 MB, most of it mapped
    assert result.plan is not None
    assert (result.plan.engine, result.plan.replicas) == ("llamacpp", 1)
    assert len(_lessons(tmp_path)) == (result.plan.lesson is not None)
    assert not left_of(tmp_path / "run")
    assert "Memory along the whole run" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.llamacpp
def test_running_rack_is_measured_as_it_runs_and_left_running(file: Path, tmp_path: Path) -> None:
    assert _run(tmp_path, "serve", str(file), "--detach").returncode == 0
    try:
        small = ["--concurrency", "1", "--requests", "20", "--input-tokens", "48", "--output-tokens", "4"]
        done = _run(tmp_path, "bench", str(file), *small, "-o", str(tmp_path / "run"))
        assert done.returncode in (0, 7), done.stderr
        assert "started for this measurement" not in done.stderr
        assert read_result(tmp_path / "run").memory
        assert "ready" in _run(tmp_path, "status").stdout
    finally:
        stopped = _run(tmp_path, "stop")
    assert stopped.returncode == 0
    assert not left_of(tmp_path)


def test_what_is_neither_url_nor_file_is_told_what_to_type() -> None:
    with pytest.raises(UsageError, match="neither a URL nor a file") as caught:
        require_target("localhost:8080", "bench")
    assert caught.value.hint == "llamarack bench http://localhost:8080"


def test_model_that_is_not_there_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "rack.yaml"
    file.write_text(f"models:\n  - {{name: m, path: {tmp_path}/nothing.gguf, gpus: []}}\n")
    done = _run(tmp_path, "bench", str(file), "-o", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "nothing.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_lesson_that_cannot_be_kept_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMARACK_STATE_DIR", str(tmp_path))
    (tmp_path / "calibration.json").write_text("{")
    _learn(Calibration(card="x", engine="llamacpp", engine_version="1"))
    assert "not JSON" in capsys.readouterr().err
