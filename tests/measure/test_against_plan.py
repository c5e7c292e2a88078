"""A level beside the plan, on a machine whose plan is known."""

from dataclasses import replace
from typing import Any

import pytest

from llamarack.config import Deployment, Group, Limits, Model
from llamarack.measure.against_plan import PlannedRun, against_plan
from llamarack.measure.point import PointResult
from llamarack.plan.calibration import Calibration
from llamarack.plan.planner import plan_group
from llamarack.plan.record import Load
from llamarack.plan.reference import gguf_spec
from tests.measure.test_prediction import _point
from tests.plan.shapes import LLAMA2_7B, h200, machine

SPEC = gguf_spec(LLAMA2_7B, "Q8_0")
MACHINE = machine(h200(0), h200(1))
LIMITS = Limits(context_tokens=1024, sequences=4)


def _deployment(*groups: Group) -> Deployment:
    return Deployment(schema_version=1, models=[Model(name="m", path=SPEC.path, groups=list(groups))])


def _record(*cards: list[str]) -> dict[str, Any]:
    return {"models": [{"name": "m", "replicas": [{"cards": each} for each in cards]}]}


def _run(*points: PointResult, known: tuple[Calibration, ...] = (), record: dict[str, Any] | None = None) -> PlannedRun:
    deployment = _deployment(Group(gpus="auto", limits=LIMITS))
    run = against_plan(points, deployment, "m", record or _record(["GPU-1"]), SPEC, MACHINE, known)
    assert run is not None
    return run


def _at(concurrency: int, running: float = 1.0) -> PointResult:
    return replace(_point(running), concurrency=concurrency)


def test_level_is_predicted_for_its_own_lengths_and_load() -> None:
    run = _run(_at(2))
    load = Load(context_tokens=1024, concurrency=2, input_tokens=100, output_tokens=20)
    wanted = plan_group(SPEC, Group(gpus=[1], limits=LIMITS), MACHINE, model_name="m", load=load).closed_loop
    (planned,) = run.points
    assert planned is not None
    compared = {each.name: each for each in planned.compared}
    assert compared["per_token_s"].predicted == wanted.per_token_s
    assert compared["per_token_s"].measured == pytest.approx(0.020)
    assert compared["first_token_s"].predicted == wanted.first_token_s
    assert (run.device, run.devices, run.sequences) == ("NVIDIA H200", 1, 4)
    assert planned.limit.memory_bandwidth_fraction == pytest.approx(
        (SPEC.weights_bytes + 110 * 2 * 32 * 2 * 4096) / 0.020 / 4.8e12, rel=0.03
    )


def test_more_than_the_slots_hold_is_predicted_at_the_slots_without_a_first_token() -> None:
    (planned,) = _run(_at(64)).points
    assert planned is not None
    assert planned.concurrency == 4
    assert {each.name for each in planned.compared} == {"per_token_s", "tokens_per_s"}


def test_lesson_is_the_mean_factor_over_the_plain_plan_whatever_was_learnt_before() -> None:
    first = _run(_at(1), _at(2)).lesson
    assert first is not None
    assert (first.card, first.engine, first.levels) == ("NVIDIA H200", "llamacpp", 2)
    again = _run(_at(1), _at(2), known=(first,))
    assert again.lesson is not None
    assert again.lesson.per_token_factor == pytest.approx(first.per_token_factor)
    errors = [each.error_fraction for row in again.points if row for each in row.compared if each.name == "per_token_s"]
    (one, two) = [1 + error for error in errors if error is not None]
    assert one * two == pytest.approx(1.0)  # it is right about its own run


def test_first_token_teaches_only_where_one_runs_at_a_time() -> None:
    alone, together = _run(_at(1)).lesson, _run(_at(2)).lesson
    assert alone is not None
    assert together is not None
    assert together.first_token_factor == 1.0
    (planned,) = _run(_at(1)).points
    assert planned is not None
    (first,) = [each for each in planned.plain if each.name == "first_token_s"]
    assert alone.first_token_factor == pytest.approx(1 + (first.error_fraction or 0))


def test_open_loop_is_predicted_for_what_ran_at_once() -> None:
    (planned,) = _run(replace(_at(1, running=3.2), concurrency=None, rate_per_s=0.5)).points
    assert planned is not None
    assert planned.concurrency == 3


def test_invalid_levels_teach_nothing() -> None:
    assert _run(replace(_at(1), valid=False, invalid_reasons=("drift",))).lesson is None


def test_replicas_share_the_load_and_each_is_held_against_its_own_cards() -> None:
    one = _run(_at(4, running=4.0)).points[0]
    two = _run(_at(4, running=4.0), record=_record(["GPU-0"], ["GPU-1"]))
    assert two.replicas == two.devices == 2
    assert one is not None
    assert two.points[0] is not None
    # Half of the sequences' cache on each card: less is read for the same step.
    assert (two.points[0].limit.memory_bandwidth_fraction or 1) < (one.limit.memory_bandwidth_fraction or 0)


def test_several_groups_are_not_compared() -> None:
    deployment = _deployment(Group(gpus=[0]), Group(gpus=[1]))
    assert against_plan([_at(1)], deployment, "m", _record(["GPU-0"]), SPEC, MACHINE, ()) is None
