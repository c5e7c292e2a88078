import os
import socket
import sys
import time
from pathlib import Path

import pytest

from llamarack.hardware import check
from llamarack.hardware.check import Request, findings, gather, taken_ports
from tests.hardware.sound import sound


@pytest.mark.process
def test_driver_and_disk_that_never_answer_are_found_and_do_not_hold_up_the_rest(
    tmp_path: Path, order: pytest.MonkeyPatch
) -> None:
    order.setenv("FAKE_NVML", "hang")
    os.mkfifo(tmp_path / "model.gguf")  # nobody writes to it: opening it blocks like a dead network disk
    started_s = time.monotonic()
    evidence = gather(Request(model_paths=(tmp_path / "model.gguf",)), deadline_s=5)
    assert time.monotonic() - started_s < 30
    assert evidence.driver_status == "hung"
    assert [(look.subject, look.hung) for look in evidence.unanswered] == [(str(tmp_path / "model.gguf"), True)]
    assert evidence.environment is not None
    assert evidence.builds
    codes = {finding.code for finding in findings(evidence)}
    assert {"driver_hung", "no_answer"} <= codes
    assert not codes & {"no_cards", "functional_not_run"}


@pytest.mark.process
def test_this_machine_gives_a_whole_record_without_the_functional_test(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x" * 100)
    missing = tmp_path / "no-python"
    evidence = gather(Request(model_paths=(model,), interpreters=(missing,), functional=False))
    assert evidence.environment is not None
    assert [disk.size_bytes for disk in evidence.disks] == [100]
    assert [(look.subject, look.hung) for look in evidence.unanswered] == [(str(missing), False)]
    assert evidence.functional is None


def test_ports_that_others_hold_are_taken_and_free_ones_are_not() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert [(taken.host, taken.port) for taken in taken_ports([("127.0.0.1", port)])] == [("127.0.0.1", port)]
    assert taken_ports([("127.0.0.1", port)]) == ()


def test_address_of_another_machine_cannot_be_listened_on() -> None:
    (taken,) = taken_ports([("192.0.2.1", 8080)])  # a documentation address, RFC 5737
    assert "assign" in taken.reason


def test_group_is_what_one_process_can_use_together() -> None:
    machine = sound().machine
    assert [card.index for card in check._group(machine, None)] == [0, 1]
    assert [card.index for card in check._group(machine, (1,))] == [1]


@pytest.mark.process
def test_an_interpreter_that_is_our_own_is_listed_once() -> None:
    evidence = gather(Request(interpreters=(Path(sys.executable),), functional=False))
    listed = [(build.engine, build.interpreter) for build in evidence.builds]
    assert listed
    assert len(listed) == len(set(listed))
