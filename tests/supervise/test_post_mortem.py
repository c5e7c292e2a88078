"""Why an engine went down, from how it ended and what it said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarack.engine.adaptor import Diagnosis
from llamarack.errors import NeverReady
from llamarack.supervise.keeping import ChildExit
from llamarack.supervise.post_mortem import Condemned, Died, NoRoom, diagnose, is_short_of_memory, why_given_up
from llamarack.supervise.replica_record import ReplicaSpec
from tests.fake_adaptor import FakeEngine, fake_spec

OUT_OF_MEMORY = "alloc_buffer: failed to allocate buffer of size 99"


def _exit(**more: Any) -> ChildExit:
    return ChildExit(**{"code": None, "signal": None, "oom_killed": False, "asked": False, **more})


def _cause(error: Exception, *lines: str) -> str:
    return diagnose(error, lines, FakeEngine()).cause


@pytest.mark.parametrize(
    ("ended", "lines", "cause"),
    [
        ({"signal": 9}, [], "killed"),
        ({"signal": 9}, [OUT_OF_MEMORY], "killed"),  # whoever kills it is the cause, whatever it said before
        ({"signal": 9, "oom_killed": True, "oom_near": True}, [], "host_out_of_memory"),
        ({"code": 1, "oom_near": True}, [], "host_out_of_memory"),  # a rank was killed and took its parent along
        ({"code": 1, "oom_near": True}, [OUT_OF_MEMORY], "out_of_memory"),
        ({"code": 1}, [OUT_OF_MEMORY], "out_of_memory"),
        ({"signal": 11}, [], "unrecognised"),
        ({"keeper_lost": True}, [OUT_OF_MEMORY], "keeper_lost"),
    ],
)
def test_exit_and_log_tell_the_cause(ended: dict[str, Any], lines: list[str], cause: str) -> None:
    assert _cause(Died(_exit(**ended)), *lines) == cause


def test_who_was_condemned_died_of_that() -> None:
    found = Diagnosis(cause="hung", message="no token", hint=None)
    assert diagnose(Condemned(found), [OUT_OF_MEMORY], FakeEngine()) is found


def test_start_that_never_ended_is_told_by_the_log_and_else_by_itself() -> None:
    assert _cause(NeverReady("late"), OUT_OF_MEMORY) == "out_of_memory"
    assert _cause(NeverReady("late")) == "engine_never_ready"
    assert _cause(NoRoom("full")) == "memory_not_free"
    assert _cause(FileNotFoundError("x")) == "unrecognised"
    assert _cause(TimeoutError()) == "unrecognised"
    assert _cause(KeyError("x")) == "internal_error"


def _on(card: bool, tmp_path: Path, policy: str = "degrade") -> ReplicaSpec:
    spec = fake_spec("fake-0", tmp_path, on_out_of_memory=policy)
    return replace(spec, card_uuids=("GPU-0",) if card else ())


def test_hosts_memory_is_saved_by_a_smaller_plan_only_where_the_model_lives_there(tmp_path: Path) -> None:
    assert is_short_of_memory("host_out_of_memory", _on(False, tmp_path))
    assert not is_short_of_memory("host_out_of_memory", _on(True, tmp_path))
    assert is_short_of_memory("out_of_memory", _on(True, tmp_path))


@pytest.mark.parametrize(
    ("cause", "card", "policy", "words"),
    [
        ("killed", False, "degrade", None),
        ("host_out_of_memory", True, "degrade", None),  # whoever took the RAM may give it back
        ("host_out_of_memory", False, "degrade", "out of memory, and no smaller plan is left"),
        ("out_of_memory", True, "fail", "out of memory, and on_out_of_memory is fail"),
        ("model_file_damaged", True, "degrade", "the next start would end the same way"),
    ],
)
def test_what_the_next_start_would_meet_again_is_given_up(
    tmp_path: Path, cause: str, card: bool, policy: str, words: str | None
) -> None:
    assert why_given_up(cause, _on(card, tmp_path, policy)) == words
