"""The journal: one JSON object a line that fits its schema, rotated, followed, and never in the way of the service."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from llamarack.supervise import journal as journal_module
from llamarack.supervise.admin import follow
from llamarack.supervise.journal import Entry, Journal, json_schema, read_entries
from tests.supervise.asking import stream_once
from tests.supervise.conftest import DEADLINE_S, running_rack, until_http_ready
from tests.supervise.faults import Fault

pytestmark = pytest.mark.process


async def test_every_line_of_a_real_rack_fits_the_schema(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}, {"crash_in_load": True}], restarts={"max": 0}) as rack:
        await rack.until(lambda: "failed" in rack.kinds() and "ready" in rack.kinds())
    lines = rack.supervisor.paths.events.read_text().splitlines()
    assert len(lines) > 4
    for line in lines:
        jsonschema.validate(json.loads(line), json_schema())


def test_file_is_turned_over_and_the_newest_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_MAX_BYTES", 2000)
    journal = Journal(tmp_path / "events.jsonl")
    for number in range(100):
        journal.note("tick", str(number))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2300
    assert [entry.message for entry in read_entries(tmp_path / "events.jsonl", 5)] == ["95", "96", "97", "98", "99"]


@pytest.mark.fault("journal file that cannot be written", "serves on; events are shown, the loss is told")
def test_unwritable_file_is_told_once_and_once_more_when_it_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "events.jsonl"
    journal = Journal(path)
    shown: list[str] = []
    journal.on_entry.append(lambda entry: shown.append(entry.kind))
    journal.note("one", "1")
    journal.note("two", "2")
    path.parent.mkdir()
    journal.note("three", "3")
    assert shown == ["one", "journal_unwritable", "two", "three", "journal_writable"]
    assert [entry.kind for entry in read_entries(path, 9)] == ["three", "journal_writable"]
    assert journal.lost == 3


@pytest.mark.fault(
    "terminal of serve closed, or the reader of its log gone", "serves on; what nobody reads is no longer shown"
)
def test_output_that_is_gone_is_dropped_and_one_that_is_full_is_tried_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    asked: list[str] = []

    def fails(name: str, error: BaseException) -> None:
        def callback(entry: Entry) -> None:
            asked.append(name)
            raise error

        journal.on_entry.append(callback)

    fails("pipe", BrokenPipeError(errno.EPIPE, "Broken pipe"))
    fails("terminal", OSError(errno.EIO, "Input/output error"))
    fails("rich", SystemExit(1))
    fails("full", OSError(errno.ENOSPC, "No space left on device"))
    journal.on_entry.append(lambda entry: asked.append("sound"))
    journal.note("one", "1")
    journal.note("two", "2")
    assert asked == ["pipe", "terminal", "rich", "full", "sound", "full", "sound"]


@pytest.mark.fault("disk full", "serves on; told once, and once more with what was lost")
async def test_full_disk_costs_lines_and_not_the_service(tmp_path: Path, fault: Fault) -> None:
    """/dev/full answers each write as a full disk does."""
    async with running_rack(tmp_path, [{}]) as rack:
        events = rack.supervisor.paths.events
        await rack.until_ready()
        events.unlink()
        events.symlink_to("/dev/full")
        child = rack.supervisor.replicas[0].child
        assert child is not None
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        fault.strikes()
        await rack.until(lambda: "journal_unwritable" in rack.kinds())
        fault.is_found()
        await rack.until(lambda: rack.supervisor.replicas[0].restarts == 1)
        await rack.until_ready()
        await until_http_ready(rack.url)
        assert (await stream_once(rack.url, tokens=3)).fault is None
        fault.is_over()
        told = [entry.message for entry in rack.supervisor.journal.recent if entry.kind == "journal_unwritable"]
        assert len(told) == 1
        assert "No space left on device" in told[0]


async def test_followers_get_what_happens_and_end_with_the_rack(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        kinds: list[str] = []

        async def listen() -> None:
            async for entry in follow(rack.supervisor.paths, 2):
                kinds.append(entry["kind"])

        listening = asyncio.create_task(listen())
        await rack.until(lambda: len(kinds) == 2)
        rack.supervisor.journal.warn("told", "now")
        await rack.until(lambda: kinds[-1] == "told")
    await asyncio.wait_for(listening, DEADLINE_S)
    assert kinds[-1] == "rack_stopped"


def test_schema_command_prints_the_schema_of_an_event() -> None:
    words = [sys.executable, "-m", "llamarack", "schema", "--record"]
    done = subprocess.run([*words, "event"], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert set(json.loads(done.stdout)["properties"]) >= {"time_unix_s", "kind", "severity", "message", "replica"}
    wrong = subprocess.run([*words, "evnt"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert wrong.returncode == 2
    assert "none of deployment, event" in wrong.stderr
