"""BASE against NEW, through folders as bench writes them."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llamarack.errors import InvalidRun, UsageError
from llamarack.judge.bench_run import BenchRun, is_interleaved, read_bench_run
from llamarack.judge.compare import CompareResult, Decision, compare
from llamarack.judge.facts import Facts, save_facts
from llamarack.judge.gates import Gates, parse_gates
from llamarack.judge.verdict import judge
from llamarack.judge.verify_result import Bounds
from llamarack.measure.result import read_result, write_result
from llamarack.report.compare import compare_html, compare_junit, compare_markdown
from tests.judge.bench_folders import write_bench_folder
from tests.judge.test_verdict import ANSWER, collection

QUIET = (1.0, 1.005, 0.995, 1.002, 0.998)
REGRESSION = "gates:\n  - {metric: first_token_p50_s, worsening_max_fraction: 0.05, floor: 0.0005}"


def judged(base: BenchRun, new: BenchRun, text: str = REGRESSION, **options) -> CompareResult:
    gates: Gates = parse_gates(text, source="g")
    return compare(base, new, gates, gates_name="g", finished_unix_s=1_790_000_000.0, **options)


def runs(tmp_path: Path, base, new, **workload) -> tuple[BenchRun, BenchRun]:
    a = write_bench_folder(tmp_path / "base", base)
    b = write_bench_folder(tmp_path / "new", new, started_unix_s=1_790_010_000.0, **workload)
    return read_bench_run(str(a)), read_bench_run(str(b))


@pytest.mark.parametrize(
    ("factor", "decision"), [(1.0, Decision.GO), (1.03, Decision.GO), (1.1, Decision.NO_GO), (0.8, Decision.GO)]
)
def test_threshold_decides_where_the_repeats_are_quiet(tmp_path: Path, factor: float, decision: Decision) -> None:
    result = judged(*runs(tmp_path, QUIET, [factor * x for x in QUIET]))
    assert result.verdict is decision
    assert result.gates[0].measured == pytest.approx(factor - 1, abs=0.01)


def test_noise_around_the_threshold_is_inconclusive_and_says_what_it_could_have_shown(tmp_path: Path) -> None:
    result = judged(*runs(tmp_path, (1.0, 1.2, 0.85, 1.1, 0.9), (1.05, 1.25, 0.9, 1.2, 0.95)))
    assert result.verdict is Decision.INCONCLUSIVE
    assert result.gates[0].detectable is not None
    assert result.gates[0].detectable > 0.05


def test_difference_below_the_floor_never_counts(tmp_path: Path) -> None:
    base, new = runs(tmp_path, QUIET, [1.2 * x for x in QUIET])  # 20 ms become 24 ms
    assert judged(base, new).verdict is Decision.NO_GO
    floor = "gates:\n  - {metric: first_token_p50_s, worsening_max_fraction: 0.05, floor: 0.010}"
    assert judged(base, new, floor).verdict is Decision.GO


def test_throughput_is_better_when_higher(tmp_path: Path) -> None:
    base, new = runs(tmp_path, QUIET, [1.25 * x for x in QUIET])
    text = "gates:\n  - {metric: output_tokens_per_s, worsening_max_fraction: 0.05}"
    result = judged(base, new, text)
    assert result.verdict is Decision.NO_GO
    assert result.gates[0].measured == pytest.approx(0.25, abs=0.01)  # base is 25 % more than new
    promise = "gates:\n  - {metric: output_tokens_per_s, improvement_min_fraction: 0.2}"
    assert judged(new, base, promise).verdict is Decision.GO
    assert judged(base, new, promise).verdict is Decision.NO_GO


def test_limits_hold_for_new_alone(tmp_path: Path) -> None:
    base, new = runs(tmp_path, QUIET, QUIET)
    assert judged(base, new, "gates:\n  - {metric: failures_fraction, max: 0.0}").verdict is Decision.GO
    assert judged(base, new, "gates:\n  - {metric: output_tokens_per_s, min: 1000}").verdict is Decision.NO_GO


def test_two_repeats_prove_nothing(tmp_path: Path) -> None:
    result = judged(*runs(tmp_path, (1.0, 1.0), (2.0, 2.0)))
    assert result.verdict is Decision.INCONCLUSIVE
    assert "--repeat 5" in result.gates[0].reason


def test_consistency_gate_without_a_verify_result_is_open(tmp_path: Path) -> None:
    result = judged(*runs(tmp_path, QUIET, QUIET), "gates:\n  - consistency: [SAME]")
    assert result.verdict is Decision.INCONCLUSIVE
    assert "--verify" in result.gates[0].reason


def test_verdict_on_one_deployment_does_not_let_another_pass(tmp_path: Path) -> None:
    a = write_bench_folder(tmp_path / "base", QUIET)
    b = write_bench_folder(tmp_path / "new", QUIET, started_unix_s=1_790_010_000.0)
    facts = Facts(model_sha256="1" * 64, weights="F16", engine="llamacpp")
    for folder in (a, b):
        save_facts(facts, folder)
    base, new = read_bench_run(str(a)), read_bench_run(str(b))
    text = "gates:\n  - consistency: [SAME]"
    sides = [collection([ANSWER], facts=one) for one in (facts, replace(facts, weights="Q8_0"))]
    same, other = (judge(one, one, bounds=Bounds(), finished_unix_s=1_790_000_001.0) for one in sides)
    assert judged(base, new, text, consistency=same).verdict is Decision.GO
    with pytest.raises(UsageError, match=r"of another deployment than .*: weights `Q8_0` against `F16`"):
        judged(base, new, text, consistency=other)


def test_unlike_loads_are_refused_unless_told(tmp_path: Path) -> None:
    base, new = runs(tmp_path, QUIET, QUIET, input_tokens=32)
    with pytest.raises(UsageError) as caught:
        judged(base, new)
    assert "input_tokens: 16 against 32" in caught.value.message
    assert caught.value.hint == "if that is meant: --allow input_tokens"
    assert judged(base, new, allowed=["input_tokens"]).verdict is Decision.GO
    assert judged(base, new, allow_unlike=True).differences


def test_unlike_facts_are_refused_unless_the_gates_say_that_they_are_meant(tmp_path: Path) -> None:
    a = write_bench_folder(tmp_path / "base", QUIET)
    b = write_bench_folder(tmp_path / "new", QUIET)
    facts = Facts(model_sha256="1" * 64, weights="F16", cards=("H200",), engine="llamacpp")
    save_facts(facts, a)
    save_facts(replace(facts, weights="Q8_0", cards=("L4",)), b)
    base, new = read_bench_run(str(a)), read_bench_run(str(b))
    with pytest.raises(UsageError, match="weights: F16 against Q8_0; cards: H200 against L4"):
        judged(base, new)
    meant = f"allow_different: [weights, cards]\n{REGRESSION}"
    assert [one.name for one in judged(base, new, meant).differences] == ["weights", "cards"]


def test_lengths_that_came_out_otherwise_are_found(tmp_path: Path) -> None:
    base, new = runs(tmp_path, QUIET, QUIET)
    result = new.results[0]
    point = result.points[0]
    longer = replace(point, output_tokens=replace(point.output_tokens, mean=6.0))
    changed = replace(new, results=(replace(result, points=(longer,)),))
    with pytest.raises(UsageError, match=r"reached_output_tokens: 5.0 at 1 against 6.0 at 1"):
        judged(base, changed)


def test_invalid_run_is_refused(tmp_path: Path) -> None:
    folder = write_bench_folder(tmp_path / "base", QUIET)
    result = read_result(folder)
    bad = replace(result.points[0], valid=False, invalid_reasons=("the client lagged",))
    write_result(replace(result, valid=False, points=(bad,)), folder)
    with pytest.raises(InvalidRun, match="the client lagged"):
        read_bench_run(str(folder))
    assert read_bench_run(str(folder), accept_invalid=True).results


def test_runs_taken_in_turns_are_paired_and_others_are_not(tmp_path: Path) -> None:
    start = 1_790_000_000.0
    names: dict[str, list[str]] = {"a": [], "b": []}
    moods = (1.0, 1.3, 0.7, 1.2)
    for number, mood in enumerate(moods):
        first = 50 * (number % 2)  # A B B A: no side always comes first
        for side, factor, shift in (("a", 1.0, first), ("b", 1.1, 50 - first)):
            folder = tmp_path / f"{side}{number}"
            write_bench_folder(folder, [mood * factor], started_unix_s=start + 100 * number + shift)
            names[side].append(str(folder))
    base, new = (read_bench_run(",".join(names[side])) for side in ("a", "b"))
    assert is_interleaved(base, new)
    assert judged(base, new).verdict is Decision.NO_GO  # the mood of the machine is three times the effect
    late = replace(new, started_unix_s=tuple(at + 10_000 for at in new.started_unix_s))
    assert not is_interleaved(base, late)
    assert judged(base, late).verdict is Decision.INCONCLUSIVE


def test_folders_of_different_runs_are_no_repeats(tmp_path: Path) -> None:
    a = write_bench_folder(tmp_path / "a", QUIET)
    b = write_bench_folder(tmp_path / "b", QUIET, input_tokens=99)
    with pytest.raises(UsageError, match="no repeats of one run: they differ in input_tokens"):
        read_bench_run(f"{a},{b}")


def test_one_run_may_be_held_against_itself_at_another_level(tmp_path: Path) -> None:
    folder = write_bench_folder(tmp_path / "a", QUIET)
    run = read_bench_run(str(folder))
    text = "gates:\n  - {metric: output_tokens_per_s, improvement_min_fraction: 1.0, base_at: 1, at: [1]}"
    assert judged(run, run, text).verdict is Decision.NO_GO


def test_reports_say_the_same_in_every_form(tmp_path: Path) -> None:
    base, new = runs(tmp_path, QUIET, [1.2 * x for x in QUIET])
    text = f"{REGRESSION}\n  - {{metric: failures_fraction, max: 0}}\n  - consistency: [SAME]"
    result = judged(base, new, text)
    suite = ElementTree.fromstring(compare_junit(result))
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
    }
    page, markdown = compare_html(result), compare_markdown(result)
    for said in (page, markdown):
        assert "NO-GO" in said
        assert "surely worse" in said
    assert "http" not in page.split("<details>")[0].replace("http-equiv", "")


def test_report_of_several_folders_is_titled_by_the_first(tmp_path: Path) -> None:
    result = replace(judged(*runs(tmp_path, QUIET, QUIET)), base="runs/a1,runs/a2,runs/a3", new="runs/b1")
    assert compare_markdown(result).startswith("# runs/b1 against runs/a1 and 2 more: ")
    assert "<title>runs/b1 against runs/a1 and 2 more" in compare_html(result)
