"""What each step's result means for an acceptance, its one verdict, and what is said of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from llamarack.errors import InvalidRun, LlamarackError, UsageError
from llamarack.hardware.finding import Finding, Severity
from llamarack.judge.acceptance import (
    AcceptanceResult,
    Outcome,
    Step,
    ends_the_run,
    saved_bench,
    saved_reference,
    skipped_rest,
    step_of_error,
    verdict_of,
)
from llamarack.judge.bench_run import read_bench_run
from llamarack.judge.collection import REFERENCE_NAME
from llamarack.judge.compare import Decision, compare
from llamarack.judge.facts import Facts
from llamarack.judge.gates import parse_gates
from llamarack.measure.result import read_result
from llamarack.report.acceptance import (
    acceptance_html,
    acceptance_junit,
    acceptance_markdown,
    print_acceptance,
    steps_table,
)
from llamarack.report.acceptance_steps import bench_step, check_step, compare_step, serve_step, verify_step
from tests.judge.bench_folders import write_bench_folder
from tests.judge.observed import sure
from tests.judge.test_verdict import ANSWER, collection, forced_like
from tests.judge.test_verdict import verdict_of as judged


def steps(**outcomes: Outcome) -> list[Step]:
    names = ("check", "serve", "verify", "bench", "compare")
    return [
        Step(name=name, outcome=outcomes.get(name, Outcome.PASSED), seconds=1.0, summary="it <came> out")
        for name in names
    ]


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ({}, Decision.GO),
        ({"compare": Outcome.SKIPPED}, Decision.GO),  # the first acceptance has no base
        ({"compare": Outcome.INCONCLUSIVE}, Decision.INCONCLUSIVE),
        ({"bench": Outcome.INCONCLUSIVE}, Decision.INCONCLUSIVE),
        ({"verify": Outcome.SKIPPED}, Decision.INCONCLUSIVE),
        ({"verify": Outcome.FAILED, "bench": Outcome.INCONCLUSIVE}, Decision.NO_GO),
        ({"compare": Outcome.FAILED}, Decision.NO_GO),
    ],
)
def test_acceptance_is_as_good_as_its_worst_step(outcomes: dict[str, Outcome], verdict: Decision) -> None:
    assert verdict_of(steps(**outcomes)) is verdict


def test_acceptance_that_lost_a_step_is_no_go_ahead() -> None:
    assert verdict_of(steps()[:2]) is Decision.INCONCLUSIVE


def test_acceptance_reports_name_steps_and_changed_settings() -> None:
    result = AcceptanceResult(
        verdict=Decision.NO_GO,
        file="rack.yaml",
        model="m",
        facts=Facts(weights="Q4_1"),
        steps=tuple(steps(verify=Outcome.FAILED, compare=Outcome.SKIPPED)),
        changed_since=("bench",),
        started_unix_s=1_790_000_000.0,
        finished_unix_s=1_790_000_100.0,
    )
    page, markdown = acceptance_html(result), acceptance_markdown(result)
    for said in (page, markdown):
        assert "NO-GO" in said
        assert "settings changed since the last valid bench" in said
    assert "<came>" not in page
    suite = ElementTree.fromstring(acceptance_junit(result))
    assert (suite.get("failures"), suite.get("skipped"), suite.get("time")) == ("1", "1", "100.000")


def test_terminal_keeps_its_columns_whatever_the_steps_took() -> None:
    seconds = (0.6, 6.7, 75.0, 333.0, 0.00003)
    done = [replace(step, seconds=took, summary="SUMMARY") for step, took in zip(steps(), seconds, strict=True)]
    result = AcceptanceResult(
        verdict=Decision.GO,
        file="rack.yaml",
        model="m",
        facts=Facts(),
        steps=(*done[:4], replace(done[4], outcome=Outcome.SKIPPED, details=("SUMMARY of a detail",))),
        changed_since=(),
        started_unix_s=0.0,
        finished_unix_s=416.0,
    )
    console = Console(file=io.StringIO(), width=160)
    print_acceptance(result, console)
    lines = [line for line in console.file.getvalue().splitlines() if "SUMMARY" in line]  # type: ignore[attr-defined]
    assert len(lines) == 6
    assert len({line.index("SUMMARY") for line in lines}) == 1
    assert lines[4].split()[:4] == ["compare", "SKIPPED", "–", "SUMMARY"]  # nothing took 0.03 ms
    assert [row[2] for row in steps_table(result).rows][2:] == [
        "1\u00a0min\u00a015\u00a0s",
        "5\u00a0min\u00a033\u00a0s",
        "–",
    ]


def test_failed_check_or_start_ends_the_run_and_names_itself_in_what_is_skipped() -> None:
    failed = [replace(steps()[0], outcome=Outcome.FAILED)]
    assert ends_the_run(failed[0])
    assert not ends_the_run(steps(verify=Outcome.FAILED)[2])  # bench still tells something
    assert not ends_the_run(steps(check=Outcome.INCONCLUSIVE)[0])
    rest = skipped_rest(failed)
    assert [one.name for one in rest] == ["serve", "verify", "bench", "compare"]
    assert {(one.outcome, one.summary) for one in rest} == {(Outcome.SKIPPED, "check failed")}
    assert verdict_of([*failed, *rest]) is Decision.NO_GO


def test_error_becomes_a_step_of_error_with_its_hint() -> None:
    step = step_of_error(
        "verify", UsageError("no such side\nmore of it", hint="--reference FILE"), prefix="no reference: "
    )
    assert (step.outcome, step.summary) == (Outcome.FAILED, "no reference: no such side")
    assert step.details == ("no such side\nmore of it", "hint: --reference FILE")
    assert step_of_error("serve", LlamarackError("")).summary == "failed"
    assert step_of_error("serve", LlamarackError("one line")).details == ()  # which is the summary already


def test_invalid_run_to_compare_with_is_no_fault_of_the_deployment() -> None:
    step = step_of_error("compare", InvalidRun("the run `a` is invalid", hint="measure again"))
    assert step.outcome is Outcome.INCONCLUSIVE
    assert verdict_of([*steps()[:4], step]) is Decision.INCONCLUSIVE


def test_base_is_an_acceptance_or_a_bench(tmp_path: Path) -> None:
    assert saved_reference(None) is None
    bench = write_bench_folder(tmp_path / "bench-alone", (1.0,))
    assert saved_reference(bench) is None
    assert saved_bench(bench) == bench
    accepted = tmp_path / "accepted"
    write_bench_folder(accepted / "bench", (1.0,))
    (accepted / "verify").mkdir()
    assert saved_reference(accepted) is None
    (accepted / "verify" / REFERENCE_NAME).write_text("{}")
    assert saved_reference(accepted) == accepted / "verify"
    assert saved_bench(accepted) == accepted / "bench"


def finding(severity: Severity) -> Finding:
    return Finding(code=f"a_{severity}", severity=severity, subject="card 0", seen="it is hot", why="", fix="cool it")


def test_check_fails_on_an_error_and_says_what_to_do() -> None:
    error, warning = finding(Severity.ERROR), finding(Severity.WARNING)
    step = check_step([warning, error, finding(Severity.NOTE)])
    assert (step.outcome, step.summary) == (Outcome.FAILED, "1 error, 1 warning")
    assert step.details[0] == "error: a_error, card 0: it is hot; fix: cool it"
    assert check_step([warning, warning]).outcome is Outcome.PASSED
    assert check_step([]).summary == "0 errors, 0 warnings"


def test_serve_tells_planned_and_resident_bytes_of_each_replica() -> None:
    replica: dict[str, Any] = {"id": "m-0", "state": "ready", "slots_total": 2, "context_tokens": 4096}
    replica |= {"predicted": {"total_bytes": 3 * 2**30}, "actual": {"resident_bytes": 2 * 2**30}}
    step = serve_step({"models": [{"replicas": [replica]}]}, 61.0)
    assert step.summary == "1 replica ready after 1 min 01 s"
    (detail,) = step.details
    assert "2 slots of 4,096 tokens" in detail
    assert "planned 3.0 GiB, resident 2.0 GiB" in detail


def test_verify_passes_fails_or_stays_open_by_its_verdict() -> None:
    same = judged(collection([ANSWER]), collection([ANSWER]))
    assert verify_step(same, None).outcome is Outcome.PASSED
    assert "against itself" in verify_step(same, None).summary
    other = [*ANSWER[:2], sure(99, second=4, margin=0.1), ANSWER[3]]
    drifted = judged(collection([ANSWER]), collection([other], forced=forced_like([ANSWER], [other])))
    step = verify_step(drifted, "fp16.yaml")
    assert step.outcome is Outcome.FAILED
    assert "DRIFT" in step.summary
    assert "against fp16.yaml" in step.summary
    assert step.details
    open_one = replace(same, verdict=type(same.verdict)("INCONCLUSIVE"))
    assert verify_step(open_one, None).outcome is Outcome.INCONCLUSIVE


def test_invalid_bench_proves_nothing_either_way(tmp_path: Path) -> None:
    result = read_result(write_bench_folder(tmp_path / "a", (1.0, 1.0, 1.0)))
    step = bench_step(result)
    assert step.outcome is Outcome.PASSED
    assert "tokens/s" in step.summary
    point = replace(result.points[0], invalid_reasons=("the client was late",))
    wrong = bench_step(replace(result, valid=False, points=(point,)))
    assert (wrong.outcome, wrong.summary) == (Outcome.INCONCLUSIVE, "the run is invalid: the client was late")
    assert wrong.details[-1].endswith("accept it again while the machine does nothing else")
    second = bench_step(result, replace(result, valid=False, points=(point,)))
    assert second.outcome is Outcome.PASSED
    assert second.details[0] == "measured twice: the first run was invalid: the client was late"
    assert second.details[1:] == step.details


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.0, Outcome.PASSED), (1.5, Outcome.FAILED), (1.045, Outcome.INCONCLUSIVE)]
)
def test_comparison_with_the_base_decides_its_step(tmp_path: Path, factor: float, outcome: Outcome) -> None:
    noise = (1.0, 1.01, 0.99)
    base = read_bench_run(str(write_bench_folder(tmp_path / "a", noise)))
    slower = write_bench_folder(tmp_path / "b", [factor * x for x in noise], started_unix_s=1_790_010_000.0)
    gates = parse_gates("gates:\n  - {metric: first_token_p50_s, worsening_max_fraction: 0.05}", source="g")
    result = compare(base, read_bench_run(str(slower)), gates, gates_name="mine", finished_unix_s=0.0)
    step = compare_step(result, "accepted")
    assert step.outcome is outcome
    said = {"PASSED": "GO", "FAILED": "0 of 1 gates GO, 1 NO-GO", "INCONCLUSIVE": "0 of 1 gates GO, 1 INCONCLUSIVE"}
    assert step.summary == f"{said[outcome]} against accepted by the gates `mine`"
    assert (step.report or "").startswith("compare/")
