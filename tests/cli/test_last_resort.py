"""No traceback reaches a user: what the system refuses is a sentence, a fault of our own a sentence and a record."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from llamarack.cli.last_resort import as_told

pytestmark = pytest.mark.process

_BROKEN = """
import sys
import llamarack.cli
from llamarack.cli import schema
{change}
sys.argv = ["llamarack", "schema"]
llamarack.cli.main()
"""


def _run(tmp_path: Path, change: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BROKEN.format(change=change)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "LLAMARACK_STATE_DIR": str(tmp_path / "state"), "NO_COLOR": "1", **environment},
        check=False,
    )


_FAULT = "def broken(*a, **k): raise KeyError('lost')\nschema.import_module = broken"


def test_fault_of_our_own_is_a_sentence_and_a_record_that_only_the_user_reads(tmp_path: Path) -> None:
    done = _run(tmp_path, _FAULT)
    assert done.returncode == 1
    assert done.stderr.startswith("error: internal fault: KeyError: ")
    assert "cli/schema.py:" in done.stderr
    assert "Traceback" not in done.stderr
    (record,) = (tmp_path / "state" / "faults").glob("*.json")
    assert str(record) in done.stderr.replace("\n", "")
    kept = orjson.loads(record.read_bytes())
    assert kept["command"] == ["schema"]
    assert any("KeyError" in line for line in kept["traceback"])
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700


def test_fault_is_told_also_where_no_record_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    done = _run(tmp_path, _FAULT)
    assert done.returncode == 1
    assert "internal fault: KeyError" in done.stderr
    assert "LLAMARACK_TRACEBACK=1" in done.stderr
    assert "Traceback" not in done.stderr


def test_traceback_is_shown_to_who_asks_for_it(tmp_path: Path) -> None:
    done = _run(tmp_path, _FAULT, LLAMARACK_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_only_the_newest_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMARACK_STATE_DIR", str(tmp_path))
    (tmp_path / "faults").mkdir()
    for number in range(1000, 1030):
        (tmp_path / "faults" / f"{number}-1.json").write_text("{}")
    as_told(ValueError("one more"))
    names = sorted(path.name for path in (tmp_path / "faults").iterdir())
    assert len(names) == 20
    assert names[0] == "1011-1.json"


@pytest.mark.parametrize(
    ("number", "exit_code", "hint"),
    [
        (errno.ENOSPC, 3, "make room"),
        (errno.EMFILE, 3, "ulimit -n"),
        (errno.ENOENT, 2, "mkdir -p /nowhere/models"),
        (errno.EACCES, 2, "ls -ld /nowhere/models /nowhere/models/f"),
        (errno.EISDIR, 2, "name a file in it"),
    ],
)
def test_what_the_system_refused_names_the_path_and_what_to_do(number: int, exit_code: int, hint: str) -> None:
    told = as_told(OSError(number, os.strerror(number), "/nowhere/models/f"))
    assert told.exit_code == exit_code
    assert told.message == f"`/nowhere/models/f`: {os.strerror(number)}"
    assert hint in (told.hint or "")


def test_full_disk_without_a_name_is_told_with_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMARACK_STATE_DIR", str(tmp_path))
    told = as_told(OSError(errno.ENOSPC, "No space left on device"))
    assert told.exit_code == 3
    assert f"df -h {tmp_path}" in (told.hint or "")


def test_socket_that_fails_is_a_fault_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMARACK_STATE_DIR", str(tmp_path))
    assert as_told(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")).exit_code == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault(tmp_path: Path, closed: str) -> None:
    script = f'exec "$0" -m llamarack status --rack none {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LLAMARACK_STATE_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 5
    assert "Traceback" not in done.stderr


def test_reader_that_has_seen_enough_is_no_fault(tmp_path: Path) -> None:
    """rich ends a program with 1 where its pipe is gone; other commands of ours end with 0."""
    script = 'set -o pipefail; "$0" -m llamarack plan --table llama2 2>&1 | true'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LLAMARACK_STATE_DIR": str(tmp_path)},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
