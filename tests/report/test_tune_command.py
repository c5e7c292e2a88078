"""What the tune command says and writes, on results made by hand and one whole run."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from llamarack.cli.tune import _start, conclusion, outcome_line, tune_command
from llamarack.config import load, parse
from llamarack.errors import InvalidRun, ModelError
from llamarack.measure.client import Client
from llamarack.measure.distribution import Interval
from llamarack.measure.tune import DEFAULTS, Outcome, Trial, TuneResult, with_trial
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from tests.measure.test_tune_run import Racks

BEST = Trial(batch_tokens=512, sequences=8)


def _result(low: float, high: float) -> TuneResult:
    interval = Interval(low=low, high=high)
    return TuneResult(best=BEST, outcomes=(), gain_fraction=(low + high) / 2, gain_interval=interval, is_better=low > 0)


def test_gain_is_said_with_its_interval_and_doubt_keeps_the_file() -> None:
    assert conclusion(_result(0.1, 0.3)) == (
        "best: batch_tokens 512, sequences 8: +20.0% [+10.0% to +30.0%] over the engine's own batch"
    )
    assert conclusion(_result(-0.1, 0.3)).endswith("not shown to be better, the file stays as it is")


def test_outcome_without_goodput_gives_its_reason() -> None:
    failed = Outcome(trial=BEST, goodput_per_s=None, memory_fraction=None, reason="out of memory")
    assert outcome_line(failed) == "batch_tokens 512, sequences 8: no goodput (out of memory)"
    good = Outcome(trial=DEFAULTS, goodput_per_s=1.5, memory_fraction=0.5)
    assert outcome_line(good).endswith("1.500 good requests/s, fullest card 50%")


@pytest.mark.process
def test_command_tries_settings_and_leaves_the_users_file_alone(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    file = tmp_path / "rack.yaml"
    file.write_text(
        "schema_version: 1\nmodels:\n- name: m\n  path: m.gguf\n  limits: {sequences: 1, context_tokens: 256}\n"
    )
    before = file.read_text()
    app, racks = typer.Typer(), Racks()
    app.command()(tune_command(racks.start))
    small = ["--concurrency", "2", "--requests", "20", "--input-tokens", "16", "--output-tokens", "2"]
    outcome = CliRunner().invoke(app, [str(file), *small, "--slo", "ttft:60000", "--folder", str(tmp_path / "run")])
    # A client that was itself late on a busy machine calls every trial invalid, and then nothing was measured.
    assert outcome.exit_code in (0, 7) or isinstance(outcome.exception, InvalidRun)
    assert racks.started[:2] == ["auto", 128]
    assert racks.num_running == 0
    assert file.read_text() == before
    tuned = tmp_path / "rack.tuned.yaml"
    if tuned.exists():
        assert load(tuned).deployment.models[0].groups[0].limits.batch_tokens in (128, 256)


@pytest.mark.llamacpp
async def test_trial_runs_on_a_rack_of_the_real_engine_with_its_settings(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LLAMARACK_LOAD_LOCK", str(tmp_path / "load.lock"))
    try:
        model = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    limits = "{context_tokens: 512, sequences: 1, threads: 1}"
    deployment = parse(f"models:\n  - {{name: m, path: {model}, gpus: [], limits: {limits}}}\n").deployment
    trial = with_trial(deployment, Trial(batch_tokens=128, sequences=2), model="m")
    async with _start(trial) as rack:
        assert rack.source is not None
        (replica,) = (await rack.source.status())["models"][0]["replicas"]
        assert replica["slots_total"] == 2
        assert await rack.memory_fraction() is None  # on the processor there is no card to fill
        client = Client(rack.target)
        try:
            answer = await client.call("GET", "/v1/models", timeout_s=30.0)
        finally:
            client.close()
        assert answer.status == 200
