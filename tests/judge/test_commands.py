"""The commands as a user types them: exit codes, what is printed where, what is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.measure.result import read_result, write_result
from tests.judge.bench_folders import write_bench_folder
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.process
TIMEOUT_S = 120
QUIET = (1.0, 1.005, 0.995, 1.002, 0.998)


def llamarack(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamarack", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=cwd, check=False)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_bench_folder(tmp_path / "before", QUIET)
    write_bench_folder(tmp_path / "same", QUIET, started_unix_s=1_790_010_000.0)
    write_bench_folder(tmp_path / "slow", [1.5 * x for x in QUIET], started_unix_s=1_790_010_000.0)
    write_bench_folder(tmp_path / "other", QUIET, started_unix_s=1_790_010_000.0, input_tokens=99)
    (tmp_path / "gates.yaml").write_text(
        "gates:\n"
        "  - {metric: first_token_p50_s, worsening_max_fraction: 0.05}\n"
        "  - {metric: failures_fraction, max: 0}\n"
    )
    return tmp_path


def test_compare_says_go_and_leaves_its_reports(runs: Path) -> None:
    done = llamarack("compare", "before", "same", "--gates", "gates.yaml", "-o", "out", cwd=runs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("GO: ")
    assert {path.name for path in (runs / "out").iterdir()} == {"compare.json", "report.html", "report.md", "junit.xml"}
    assert "report: out/report.html" in done.stderr


def test_report_of_another_command_is_not_written_over(runs: Path) -> None:
    (runs / "before" / "report.html").write_text("of bench")
    done = llamarack("compare", "before", "same", "--gates", "gates.yaml", "-o", "before", cwd=runs)
    assert done.returncode == 2
    assert "`-o before` holds a report already" in done.stderr
    assert (runs / "before" / "report.html").read_text() == "of bench"
    soak = llamarack("soak", "http://127.0.0.1:1", "-o", "before", cwd=runs)
    assert "`-o before` holds a report already" in soak.stderr


def test_comparison_made_again_takes_the_place_of_the_former(runs: Path) -> None:
    for _ in range(2):
        assert llamarack("compare", "before", "same", "--gates", "gates.yaml", "-o", "out", cwd=runs).returncode == 0


def test_compare_json_is_the_only_thing_on_standard_output(runs: Path) -> None:
    done = llamarack("compare", "before", "slow", "--gates", "gates.yaml", "--json", cwd=runs)
    assert done.returncode == 6
    record = json.loads(done.stdout)
    assert record["verdict"] == "NO-GO"
    assert {"measured", "bound", "interval"} <= record["gates"][0].keys()


def test_compare_without_a_verify_result_leaves_the_default_gates_open(runs: Path) -> None:
    done = llamarack("compare", "before", "same", cwd=runs)
    assert done.returncode == 7
    assert "--verify DIR" in done.stdout


def test_compare_refuses_unlike_runs_with_the_flag_to_type(runs: Path) -> None:
    done = llamarack("compare", "before", "other", "--gates", "gates.yaml", cwd=runs)
    assert done.returncode == 2
    assert "input_tokens: 16 against 99" in done.stderr
    assert "--allow input_tokens" in done.stderr
    allowed = llamarack("compare", "before", "other", "--gates", "gates.yaml", "--allow", "input_tokens", cwd=runs)
    assert allowed.returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "nowhere", "same"), "nowhere"),
        (("compare", "before", "same", "--gates", "strict"), "one of default"),
        (("verify", "--reference", "nowhere.yaml", "--candidate", "x"), "neither a URL nor a file"),
        (("verify", "--reference", "gates.yaml"), "--candidate FILE, or -o DIR"),
        (("verify", "--reference", "a", "--candidate", "b", "--method", "guess"), "steps, prompt, text"),
        (("verify", "--reference", "a", "--candidate", "b", "--prompts", "nowhere"), "nowhere"),
        (("acceptance", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_mistake_is_one_sentence_with_what_to_type(runs: Path, words: tuple[str, ...], said: str) -> None:
    done = llamarack(*words, cwd=runs)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_acceptance_refuses_a_base_that_proves_nothing_before_it_starts(runs: Path) -> None:
    model = write_tiny_llama(runs / "tiny.gguf")
    result = read_result(runs / "before")
    write_result(replace(result, valid=False), runs / "before")
    done = llamarack("acceptance", str(model), "--base", "before", "-o", "out", cwd=runs)
    assert done.returncode == 7, done.stderr
    assert "`before` is invalid" in done.stderr
    assert not (runs / "out").exists()


def test_verify_tells_where_nothing_answers(runs: Path) -> None:
    done = llamarack("verify", "--reference", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9", cwd=runs)
    assert done.returncode == 5
    assert "nothing answers" in done.stderr
