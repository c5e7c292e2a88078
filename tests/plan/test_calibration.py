"""What bench teaches is kept, replaced by the next lesson on the same subject, and found again by plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.config import Group
from llamarack.errors import UsageError
from llamarack.plan.calibration import (
    Calibration,
    best_calibration,
    calibration_path,
    own_calibrations,
    read_calibrations,
    remember,
)
from llamarack.plan.planner import plan_group
from llamarack.plan.reference import gguf_spec
from tests.plan.shapes import LLAMA2_7B, h200, machine

LESSON = Calibration(
    card="NVIDIA H200",
    engine="llamacpp",
    engine_version="b11434",
    per_token_factor=1.5,
    first_token_factor=2.0,
    decode_bytes=7_000_000_000,
    measured_unix_s=100,
    levels=3,
)


def _found(known, **changed) -> Calibration | None:
    asked = {"card": "NVIDIA H200", "engine": "llamacpp", "engine_version": "b11434", "decode_bytes": 7_000_000_000}
    return best_calibration(known, **{**asked, **changed})


def test_lessons_are_kept_and_the_next_on_the_same_subject_replaces_the_last() -> None:
    assert own_calibrations() == ()
    other = replace(LESSON, decode_bytes=100_000_000, per_token_factor=3.0)
    again = replace(LESSON, per_token_factor=1.25, measured_unix_s=200)
    for lesson in (LESSON, other, again):
        remember(lesson, calibration_path())
    assert own_calibrations() == (other, again)
    assert [path.name for path in calibration_path().parent.iterdir()] == ["calibration.json"]


def test_nearest_model_in_size_counts_and_of_equals_the_newest() -> None:
    small = replace(LESSON, decode_bytes=100_000_000)
    newer = replace(LESSON, measured_unix_s=300)
    unsized = replace(LESSON, decode_bytes=None)
    assert _found([small, LESSON, unsized], decode_bytes=13_000_000_000) == LESSON
    assert _found([small, LESSON], decode_bytes=200_000_000) == small
    assert _found([LESSON, newer]) == newer
    assert _found([unsized]) == unsized


@pytest.mark.parametrize("changed", [{"card": "NVIDIA L4"}, {"engine": "vllm"}, {"engine_version": "b11549"}])
def test_lesson_holds_for_its_card_engine_and_version_alone(changed) -> None:
    assert _found([LESSON], **changed) is None
    assert _found([LESSON], engine_version=None) == LESSON  # a plan that names no version takes any


def test_plan_of_a_group_goes_by_what_was_learnt() -> None:
    spec, group = gguf_spec(LLAMA2_7B, "Q8_0"), Group(gpus=[0])
    plain = plan_group(spec, group, machine(h200()), model_name="m").predicted
    learnt = plan_group(spec, group, machine(h200()), model_name="m", calibrations=[LESSON]).predicted
    assert learnt.per_token_s == pytest.approx(1.5 * (plain.per_token_s or 0))
    assert learnt.first_token_s == pytest.approx(2.0 * (plain.first_token_s or 0))


def test_factor_beyond_reason_is_not_kept() -> None:
    with pytest.raises(UsageError, match=r"0\.05 to 20"):
        remember(replace(LESSON, per_token_factor=21.0), calibration_path())
    assert own_calibrations() == ()


def test_damaged_file_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        remember(LESSON, path)
    assert path.read_text() == "{"
    path.write_text(json.dumps({"schema_version": 1, "calibrations": [{"card": "x", "engine": "y"}]}))
    with pytest.raises(UsageError, match="engine_version"):
        read_calibrations(path)
