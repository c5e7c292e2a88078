"""What the tune command says and writes, on results made by hand and one whole run."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from llamarack.cli.tune import _notes, _start, tune_command
from llamarack.config import load, parse
from llamarack.errors import InvalidRun, ModelError, UsageError
from llamarack.measure.client import Client
from llamarack.measure.point import Level
from llamarack.measure.result import environment
from llamarack.measure.tune import LevelGain, Outcome, Trial, claim_of
from llamarack.measure.tune_record import Load, TuneResult, WeightsUsed, json_schema, to_json
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from llamarack.report.tune import (
    conclusion,
    failures_table,
    levels_table,
    outcome_line,
    trial_name,
    trials_table,
    tune_html,
    tune_markdown,
)
from tests.measure.test_tune import seen
from tests.measure.test_tune_run import Racks
from tests.tiny_model import write_tiny_llama

START = Trial(sequences=8, context_tokens=4096)
BEST = Trial(batch_tokens=512, sequences=8, context_tokens=4096)
OWN = Trial(is_own=True)
OWN_LIMITS = {"sequences": 4, "kv_unified": True, "context_tokens": 8192}
Q8 = WeightsUsed(path="/m/q8.gguf", engine="llamacpp", engine_version="b11434", precision="Q8_0", own=OWN_LIMITS)
Q4 = replace(Q8, path="/m/q4.gguf", precision="Q4_K_M")
RESULT = TuneResult(
    file="rack.yaml",
    model="m",
    environment=environment(started_unix_s=1_790_000_000.0, started_monotonic_ns=0),
    weights=(Q8, Q4),
    load=Load(
        concurrency=(4, 8),
        rates_per_s=(),
        requests=(30, 40),
        prompts="synthetic",
        input_tokens=256,
        output_tokens=128,
        slo="ttft:1000,tpot:100",
    ),
    start=START,
    outcomes=(seen(OWN, 1.0), seen(START, 1.5), seen(BEST, 2.0)),
)


def found(best: Trial, *claims, is_better: bool = True) -> TuneResult:
    return replace(RESULT, best=best, claims=claims, is_better=is_better)


OVER_OWN = claim_of("own", [(2.0, 1.0), (2.1, 1.0), (1.9, 1.0)])
OVER_FILE = claim_of("file", [(2.0, 1.5), (2.1, 1.5), (1.9, 1.6)])
NOISE = claim_of("file", [(2.0, 1.5), (1.2, 1.5), (1.9, 1.6)])


def test_gains_are_said_with_their_intervals() -> None:
    assert conclusion(found(BEST, OVER_OWN, OVER_FILE)) == [
        "best: batch_tokens 512, sequences 8",
        "+99.8% [+76.5% to +126.3%] over llamacpp's own settings at equal precision (Q8_0)",
        "+30.4% [+5.7% to +60.9%] over the file as it is",
    ]


def test_doubt_keeps_the_file() -> None:
    said = conclusion(found(BEST, OVER_OWN, NOISE, is_better=False))
    assert said[2].endswith("over the file as it is, which is no proof of a gain")
    assert said[3] == "not shown to be better than the file, which stays as it is"
    best_is_file = conclusion(found(START, OVER_OWN, is_better=False))
    assert best_is_file[0] == "best: the file: batch_tokens auto, sequences 8"
    assert best_is_file[-1] == "no setting was better than the file, which stays as it is"


def test_file_that_does_not_run_is_replaced_and_its_reason_said() -> None:
    dead = Outcome(trial=START, goodput_per_s=None, is_full=True, reason="out of memory")
    said = conclusion(replace(found(BEST, OVER_OWN), outcomes=(seen(OWN, 1.0), dead, seen(BEST, 2.0))))
    assert said[-1] == "the file as it is does not run: out of memory"


def test_other_precision_is_said_and_its_answers_must_be_verified() -> None:
    over_precision = claim_of("precision", [(2.0, 1.5), (2.1, 1.5), (1.9, 1.6)])
    finer = replace(BEST, weights=1)
    result = found(finer, OVER_OWN, OVER_FILE, over_precision)
    said = conclusion(replace(result, outcomes=(*result.outcomes, seen(finer, 2.0))))
    assert said[0] == "best: batch_tokens 512, sequences 8, q4.gguf"
    assert said[1].endswith("over llamacpp's own settings at equal precision (Q4_K_M)")
    assert said[3].endswith("over the best setting at the file's precision (Q8_0, here Q4_K_M on llamacpp)")
    assert "llamarack verify" in said[4]


def test_weights_of_another_engine_are_named_with_it() -> None:
    folder = replace(Q8, path="/m/hf", engine="vllm", precision="BF16")
    two = replace(RESULT, weights=(Q8, folder))
    assert trial_name(replace(BEST, weights=1), two) == "batch_tokens 512, sequences 8, hf on vllm"
    assert trial_name(Trial(is_own=True, weights=1), two).startswith("vllm's own: 4 sequences")
    assert trial_name(replace(BEST, weights=1), RESULT) == "batch_tokens 512, sequences 8, q4.gguf"


def test_engine_that_keeps_the_promise_for_nobody_has_no_ratio() -> None:
    said = conclusion(found(BEST, claim_of("own", [(2.0, 0.0)] * 3), OVER_FILE))
    assert said[1] == (
        "2.000 good requests/s where llamacpp's own settings at equal precision (Q8_0) keep the promise for none"
    )


def test_promise_that_nobody_keeps_names_what_could_be_kept() -> None:
    nothing = replace(RESULT, best=START, outcomes=(seen(START, 0.0),))
    assert conclusion(nothing) == [
        "no setting keeps ttft:1000,tpot:100 for a single request; the shortest medians were 100 ms to the first token "
        "and 10 ms per token"
    ]


def test_loads_that_only_suit_the_file_are_named() -> None:
    (note,) = _notes((Level(concurrency=16), Level(concurrency=64)), 4)
    assert "add 4 to --concurrency" in note
    assert _notes((Level(concurrency=4), Level(concurrency=64)), 4) == ()
    assert _notes((Level(rate_per_s=2.0),), 4) == ()
    assert conclusion(replace(found(BEST, OVER_OWN, OVER_FILE), notes=(note,)))[-1] == note


def test_outcome_says_its_load_or_its_reason() -> None:
    failed = Outcome(trial=BEST, goodput_per_s=None, is_full=True, reason="out of memory")
    assert outcome_line(failed, RESULT) == "batch_tokens 512, sequences 8: no goodput (out of memory)"
    good = replace(seen(OWN, 1.5), memory_fraction=0.5)
    assert outcome_line(good, RESULT) == (
        "llamacpp's own: 4 sequences in one context of 8192: 1.500 good requests/s at concurrency 8, 100% "
        "kept the promise, fullest card 50%"
    )


def test_tables_and_pages_show_every_trial_and_level() -> None:
    level = LevelGain(
        concurrency=8, rate_per_s=None, best_per_s=2.0, own_per_s=1.0, gain_fraction=1.0, gain_interval=None
    )
    result = replace(found(BEST, OVER_OWN, OVER_FILE), by_level=(level,))
    assert [row[1] for row in trials_table(result).rows] == ["1.000", "1.500", "2.000"]
    assert "30 to 40 requests at each" in (trials_table(result).note or "")
    assert "fullest card" not in trials_table(result).headers
    failed = Outcome(trial=BEST, goodput_per_s=None, is_full=True, reason="out of memory")
    assert failures_table(result) is None
    with_failed = replace(result, outcomes=(*result.outcomes, failed))
    assert trials_table(with_failed).rows[-1][1] == "–"
    why = failures_table(with_failed)
    assert why is not None
    assert why.rows == (("batch_tokens 512, sequences 8", "out of memory"),)
    for shown in (tune_html(with_failed), tune_markdown(with_failed)):
        assert "out of memory" in shown
    table = levels_table(result)
    assert table is not None
    assert table.rows == (("concurrency 8", "2.000", "1.000", "+100.0%", "–"),)
    assert levels_table(RESULT) is None
    page = tune_html(replace(result, model="m<script>"))
    assert "INTERRUPTED" in tune_html(replace(RESULT, is_interrupted=True))
    assert "<script>" not in page.replace("m&lt;script&gt;", "")
    assert "BETTER" in page
    assert "engine&#39;s own" in page or "engine's own" in page
    assert "| the file: batch_tokens auto, sequences 8 |" in tune_markdown(result)


def test_record_follows_its_schema() -> None:
    result = replace(found(BEST, OVER_OWN), outcomes=(seen(OWN, None), seen(BEST, 2.0)))
    Draft202012Validator(json_schema()).validate(json.loads(to_json(result)))


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "m.gguf", speaks=True, context=4096)
    path = tmp_path / "rack.yaml"
    path.write_text(
        "schema_version: 1\nmodels:\n- name: m\n  path: m.gguf\n  gpus: []\n"
        "  limits: {sequences: 1, context_tokens: 2048}\n"
    )
    return path


def _invoke(racks: Racks, *words: str):
    app = typer.Typer()
    app.command()(tune_command(racks.start))
    small = ["--requests", "20", "--input-tokens", "16", "--output-tokens", "2", "--slo", "ttft:60000"]
    return CliRunner().invoke(app, [*words, *small])


@pytest.mark.process
def test_command_tries_settings_and_leaves_the_users_file_alone(tmp_path: Path, file: Path) -> None:
    before, racks, run = file.read_text(), Racks(), tmp_path / "run"
    words = ["--concurrency", "2", "--batch-tokens", "128", "--sequences", "2", "--folder", str(run), "--json"]
    outcome = _invoke(racks, str(file), *words)
    # A client that was itself late on a busy machine calls every trial invalid, and then nothing was measured.
    assert outcome.exit_code in (0, 7) or isinstance(outcome.exception, InvalidRun)
    assert racks.started[:4] == [("auto", 4), ("auto", 1), (128, 1), ("auto", 2)] or racks.started[3][1] == 2
    assert racks.num_running == 0
    assert file.read_text() == before
    record = json.loads((run / "tune.json").read_text())
    Draft202012Validator(json_schema()).validate(record)
    assert len(record["outcomes"]) >= 4
    assert (run / "tune.html").exists()
    assert (run / "trial-1" / "report.html").exists()
    tuned = tmp_path / "rack.tuned.yaml"
    assert tuned.exists() == record["is_better"]
    if tuned.exists():
        assert load(tuned).deployment.models[0].groups[0].limits.sequences in (1, 2, 4)


@pytest.mark.process
def test_file_that_does_not_start_is_replaced_and_the_command_succeeds(tmp_path: Path, file: Path) -> None:
    """`Racks` refuses batches from 512 on."""
    file.write_text(file.read_text().replace("context_tokens: 2048", "context_tokens: 2048, batch_tokens: 512"))
    words = ["--concurrency", "2", "--batch-tokens", "128", "--sequences", "1", "--folder", str(tmp_path / "run")]
    outcome = _invoke(Racks(), str(file), *words)
    record = json.loads((tmp_path / "run" / "tune.json").read_text())
    if any(each["goodput_per_s"] for each in record["outcomes"]):  # else the client was late on a busy machine
        assert outcome.exit_code == 0, outcome.output
        assert "the file as it is does not run: out of memory on card 0" in outcome.output
        assert (tmp_path / "rack.tuned.yaml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "2", "--rate", "1"], "exclude each other"),
        (["--batch-tokens", "0"], "`--batch-tokens` `0` is not a number above 0"),
        (["--context", "16"], "a context of 16 tokens does not hold 16 + 2"),
        (["--also", "{tmp}/other.gguf"], "is another model: layers 3, the file's has 2"),
        (["--engine-python", "{tmp}/none"], "`--engine-python {tmp}/none` is not there"),
        (["-o", "{tmp}/rack.yaml"], "is the file itself"),
        (["-o", "{tmp}/no/x.yaml"], "the folder is not there"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    tmp_path: Path, file: Path, words: list[str], message: str
) -> None:
    write_tiny_llama(tmp_path / "other.gguf", layers=3)
    racks = Racks()
    outcome = _invoke(racks, str(file), *(word.format(tmp=tmp_path) for word in words))
    assert isinstance(outcome.exception, UsageError)
    assert message.format(tmp=tmp_path) in outcome.exception.message
    assert racks.started == []


def test_folder_of_another_run_is_refused(tmp_path: Path, file: Path) -> None:
    (tmp_path / "run" / "trial-1").mkdir(parents=True)
    outcome = _invoke(Racks(), str(file), "--folder", str(tmp_path / "run"))
    assert isinstance(outcome.exception, UsageError)
    assert "holds a run already" in outcome.exception.message


@pytest.mark.llamacpp
def test_interrupted_run_keeps_what_it_had_and_leaves_no_process(tmp_path: Path, file: Path, monkeypatch) -> None:
    monkeypatch.setenv("LLAMARACK_LOAD_LOCK", str(tmp_path / "load.lock"))
    monkeypatch.setenv("LLAMARACK_STATE_DIR", str(tmp_path / "state"))
    words = ["--requests", "20", "--prompts", "business-en", "--output-tokens", "64", "--folder", str(tmp_path / "run")]
    command = [sys.executable, "-m", "llamarack", "tune", str(file), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:  # until the first level is under way
            if " 1. " in line:
                break
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(120) == 130, said
    record = json.loads((tmp_path / "run" / "tune.json").read_text())
    assert record["is_interrupted"]
    assert record["best"] is None


@pytest.mark.llamacpp
async def test_trial_runs_on_a_rack_of_the_real_engine_with_its_settings(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LLAMARACK_LOAD_LOCK", str(tmp_path / "load.lock"))
    try:
        model = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    limits = "{context_tokens: 512, sequences: 2, threads: 1, batch_tokens: 128}"
    deployment = parse(f"models:\n  - {{name: m, path: {model}, gpus: [], limits: {limits}}}\n").deployment
    async with _start(deployment, tmp_path / "rack") as rack:
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
