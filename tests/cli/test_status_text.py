"""What `status` and `status --watch` say, at the widths people have."""

import asyncio
import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llamarack.cli import budget_text, plan_text, status_text
from llamarack.config import Limits
from llamarack.plan.catalogue import machine_of
from llamarack.plan.planner import plan_model
from llamarack.plan.record import Load
from llamarack.plan.reference import LLAMA2, gguf_spec
from llamarack.plan.table import example_sets, llama2_rows
from tests.browser.records import NOW, replica, status
from tests.supervise.conftest import running_rack

DEATH = {"at_unix_s": NOW, "while": "ready", "cause": "x", "message": "ran out of GPU memory", "hint": "do [this]"}


def drawn(width: int, height: int, record: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(status_text.watched(console, record, width, height))
    return capture.get().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [80, 110, 160])
@pytest.mark.parametrize("height", [24, 50])
def test_watch_fits_the_screen_and_tells_states_memory_speed_and_events(width: int, height: int) -> None:
    lines = drawn(width, height, status())
    text = "\n".join(lines)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    for wanted in ("rack llama2", "running 25  waiting 3", "1,934 ", "81 ms", "412 ms", "llama2-13b-chat-0", "ready",
                   "11/32", "68.5 GiB", "68.8 GiB", "0 H200", "498 W", "host", "23%",
                   "ready after 1 min 16 s"):  # fmt: skip
        assert wanted in text
    assert sum("llama2-13b-chat-" in line and "/32" in line for line in lines) == 2  # a replica is one line


def test_wide_screen_has_the_columns_that_a_narrow_one_leaves_out() -> None:
    wide, narrow = "\n".join(drawn(160, 50, status())), "\n".join(drawn(80, 50, status()))
    for column in ("engine", "pid", "context"):
        assert column in wide
        assert column not in narrow
    assert "█" in wide.splitlines()[3]  # tokens/s over five minutes


CHANGE = {
    "generation": 3,
    "outcome": "running",
    "going_back": False,
    "steps_done": 1,
    "steps_total": 4,
    "now": "starts llama2-13b-chat-1-g3",
    "message": None,
    "hint": None,
    "trial": None,
}


def test_watch_tells_how_far_a_running_change_is_and_why_the_newest_went_back() -> None:
    text = "\n".join(drawn(110, 40, status(change=CHANGE)))
    assert "changes to generation 3: 1 of 4 steps done; starts llama2-13b-chat-1-g3" in text
    back = {**CHANGE, "outcome": "rolled_back", "going_back": True, "message": "no [room]", "hint": "plan again"}
    text = "\n".join(drawn(110, 40, status(change=back)))
    assert "the change to generation 3 went back: no [room]" in text
    assert "hint: plan again" in text
    assert "generation" not in "\n".join(drawn(110, 40, status(change={**CHANGE, "outcome": "done"})))


def test_load_tells_how_far_it_is() -> None:
    loading = {"fraction": 0.45, "seconds": 12.0, "deadline_s": 300.0, "resident_bytes": 1, "read_bytes": 1}
    record = status(models=[{"name": "m", "replicas": [replica(0, state="loading", loading=loading)]}])
    assert any("loading 45 %" in line for line in drawn(160, 50, record))


def test_dead_replica_is_told_with_its_hint_and_holds_nothing() -> None:
    ill = replica(0, state="backoff", pid=None, last_death=DEATH, slots_stuck=2)
    record = status(models=[{"name": "llama2-13b-chat", "replicas": [ill]}])
    lines = drawn(100, 40, record)
    (row,) = (line for line in lines if "/32" in line)
    assert "backoff" in row
    assert "2 stuck" in row
    assert " – " in row
    assert any("ran out of GPU memory (while ready" in line for line in lines)
    assert any("do [this]" in line for line in lines)  # no markup of ours


def test_record_of_an_older_supervisor_is_drawn_too() -> None:
    record = status(cards=None, host=None)
    del record["gateway"]["traffic"]
    assert "llama2-13b-chat-1" in "\n".join(drawn(80, 24, record))


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("gpus", ["RTX 4090 x2", "A100-80 x8"])
def test_plan_breaks_no_line_of_its_tables(width: int, gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, soft_wrap=True)
    spec = gguf_spec(LLAMA2["13B"], "Q4_K_M")
    one = plan_model(spec, machine_of(gpus), Load(context_tokens=4096, concurrency=8), model_name="m")
    monkeypatch.setattr(budget_text, "data", console)
    with console.capture() as capture:
        plan_text.print_plan(console, one, explain=False, specs=[spec])
        load, sets = Load(context_tokens=4096, concurrency=5), example_sets()
        budget_text.print_budget(llama2_rows(sets, load, Limits()), [one.name for one in sets], load)
        budget_text.print_budget(llama2_rows(sets[1:2], load, Limits()), ["RTX 4090 x2"], load)
    text = capture.get()
    tables = [line for line in text.split("\n") if re.match(r"(card|\d |fits|tight|model|LLaMA-2)", line)]
    assert len(tables) > 14
    assert max(map(len, tables)) <= width
    assert "…" not in text
    assert text.count("Q4_K_M") >= 2
    for size in re.findall(r"^\d .*$", text, re.MULTILINE):
        assert len(re.findall(r"[\d.]+ [GM]iB", size)) >= 4  # a quantity and its unit stay together


@pytest.mark.process
async def test_watch_draws_on_a_terminal_until_ctrl_c(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        leader, follower = pty.openpty()
        watching = subprocess.Popen(  # noqa: ASYNC220 - takes 1 ms
            [sys.executable, "-m", "llamarack", "status", "--watch", "--rack", "fake", "--state-dir", str(tmp_path)],
            stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )  # fmt: skip
        os.close(follower)

        seen = await asyncio.to_thread(_read_until, leader, b"fake-0", 2)
        watching.send_signal(signal.SIGINT)
        await asyncio.to_thread(_read_to_end, leader)  # a screen that nobody reads would hold it
        assert await asyncio.to_thread(watching.wait, 30) == 0
        os.close(leader)
    assert b"\x1b[?1049h" in seen  # the screen is given back as it was
    assert b"Traceback" not in seen


def _read_to_end(fd: int) -> None:
    deadline = time.monotonic() + 60
    with contextlib.suppress(OSError):  # Linux's end of a terminal that nobody holds any more
        while time.monotonic() < deadline:
            if select.select([fd], [], [], 1.0)[0] and not os.read(fd, 65536):
                return


def _read_until(fd: int, wanted: bytes, times: int) -> bytes:
    seen = b""
    deadline = time.monotonic() + 60
    while seen.count(wanted) < times and time.monotonic() < deadline:
        if select.select([fd], [], [], 1.0)[0]:
            seen += os.read(fd, 65536)
    assert seen.count(wanted) >= times, seen
    return seen


@pytest.mark.process
@pytest.mark.parametrize(("words", "named"), [([], "terminal"), (["--json"], "--json")])
async def test_watch_without_a_terminal_says_what_to_type(tmp_path: Path, words: list[str], named: str) -> None:
    async with running_rack(tmp_path, [{}]):
        argv = [sys.executable, "-m", "llamarack", "status", "--watch", *words, "--rack", "fake"]
        done = await asyncio.to_thread(
            subprocess.run,
            [*argv, "--state-dir", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert named in done.stderr
    assert "llamarack status" in done.stderr
