"""Processes that wait to be told what they shall do: used once by the right child, ended in every other case."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llamarack.environment import KEEPER_MARK, gateway_environment
from llamarack.supervise import standby
from llamarack.supervise.keeping import ChildSpec, start_child
from llamarack.supervise.notify import take_notifier
from llamarack.supervise.start_words import understood
from tests.supervise.conftest import left_of

DEADLINE_S = 30.0
# As our worker does it: waits for a line on its standard input, then shows what it got.
_CHILD = """
import json, sys, time
if sys.argv[1:] == ["--standby"]:
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    told = json.loads(line)
    print("told", told["argv"][-1], told["env"]["LLAMARACK_ENGINE_KEY"])
else:
    print("started anew", sys.argv[1])
sys.stdout.flush()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    yield
    standby.end()


def _spec(tmp_path: Path, **more: object) -> ChildSpec:
    return ChildSpec(
        argv=[*_program(), "work"],
        env={"PATH": os.environ["PATH"], "LLAMARACK_ENGINE_KEY": "secret"},
        log_path=tmp_path / "child.log",
        control_socket=tmp_path / "k.sock",
        **more,  # type: ignore[arg-type]
    )


def _program() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _CHILD]


def _begin(tmp_path: Path, **env: str) -> int:
    standby._begin(standby.KeeperProcess(), tmp_path / "k.sock", _program(), {"PATH": os.environ["PATH"], **env})
    return standby._waiting[str(tmp_path / "k.sock")].keeper.process.pid


def _killed(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


async def _logged(tmp_path: Path) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while not (tmp_path / "child.log").exists() or not (tmp_path / "child.log").read_text().endswith("\n"):
            await asyncio.sleep(0.01)
    return (tmp_path / "child.log").read_text().strip()


async def _stop(child) -> None:
    await child.stop(grace_s=1)
    await child.release()


@pytest.mark.process
async def test_waiting_child_is_told_its_command_line_and_environment(tmp_path: Path) -> None:
    keeper = _begin(tmp_path)
    child = await start_child(_spec(tmp_path))
    try:
        assert child.keeper_pid == keeper
        assert await _logged(tmp_path) == "told work secret"
        assert child.pid is not None
        assert psutil.Process(child.pid).environ()[KEEPER_MARK] == str(tmp_path / "k.sock")
    finally:
        await _stop(child)
    assert not psutil.pid_exists(keeper)


@pytest.mark.process
async def test_child_that_inherits_descriptors_is_started_anew(tmp_path: Path) -> None:
    keeper = _begin(tmp_path)
    reader, writer = os.pipe()
    child = await start_child(_spec(tmp_path, inherit_fds=[reader]))
    try:
        assert child.keeper_pid != keeper
        assert await _logged(tmp_path) == "started anew work"
    finally:
        await _stop(child)
        os.close(reader)
        os.close(writer)


@pytest.mark.process
async def test_one_is_used_once(tmp_path: Path) -> None:
    keeper = _begin(tmp_path)
    first = await start_child(_spec(tmp_path))
    assert await _logged(tmp_path) == "told work secret"
    await _stop(first)
    (tmp_path / "child.log").unlink()
    child = await start_child(_spec(tmp_path))
    assert await _logged(tmp_path) == "started anew work"
    assert child.keeper_pid != keeper
    await _stop(child)


@pytest.mark.process
@pytest.mark.parametrize("env", [{"OMP_NUM_THREADS": "1"}, {"PATH": "/elsewhere"}])
async def test_one_with_another_environment_is_ended_and_not_used(tmp_path: Path, env: dict[str, str]) -> None:
    keeper = _begin(tmp_path, **env)
    child = await start_child(_spec(tmp_path))
    assert await _logged(tmp_path) == "started anew work"
    assert not psutil.pid_exists(keeper)
    await _stop(child)


@pytest.mark.process
async def test_child_of_another_name_leaves_it_waiting_until_the_end(tmp_path: Path) -> None:
    keeper = _begin(tmp_path)
    (tmp_path / "other").mkdir()
    child = await start_child(_spec(tmp_path / "other"))
    assert await _logged(tmp_path / "other") == "started anew work"
    assert psutil.pid_exists(keeper)
    family = psutil.Process(keeper).children()
    standby.end()
    assert not psutil.pid_exists(keeper)
    assert not any(each.is_running() for each in family)
    await _stop(child)


@pytest.mark.process
async def test_dead_one_is_replaced(tmp_path: Path) -> None:
    keeper = _killed(_begin(tmp_path))
    child = await start_child(_spec(tmp_path))
    assert await _logged(tmp_path) == "started anew work"
    assert child.keeper_pid != keeper
    await _stop(child)


@pytest.mark.process
def test_parent_that_is_killed_leaves_none_waiting(tmp_path: Path) -> None:
    code = (
        "import sys, time; from llamarack.supervise import standby, start_words; "
        "standby.begin(start_words.understood(sys.argv[1:])); "
        "print(*[each.keeper.process.pid for each in standby._waiting.values()], flush=True); time.sleep(600)"
    )
    words = ["serve", str(tmp_path / "m.gguf"), "--state-dir", str(tmp_path)]
    parent = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    keepers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(keepers) == 1
    children = [child for keeper in keepers for child in keeper.children()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([*keepers, *children], timeout=DEADLINE_S)
    assert not alive


def test_gateway_hears_nothing_that_a_manager_told_the_supervisor_alone() -> None:
    """The supervisor takes it out of its own environment, before or after."""
    at_first = {"PATH": "/bin", "NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}
    later = dict(at_first)
    take_notifier(later)
    assert gateway_environment(at_first) == gateway_environment(later) == {"PATH": "/bin", "PYTHONUNBUFFERED": "1"}


@pytest.mark.process
def test_command_that_fails_before_it_starts_anything_leaves_nothing(tmp_path: Path) -> None:
    words = ["serve", str(tmp_path / "missing.gguf"), "--state-dir", str(tmp_path / "s")]
    done = subprocess.run([sys.executable, "-m", "llamarack", *words], capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert not left_of(tmp_path / "s")


@pytest.mark.parametrize(
    ("words", "rack", "model"),
    [
        (["demo"], "demo", "smollm2-135m"),
        (["demo", "--once", "--prompt", "--rack", "--rack=mine"], "mine", "smollm2-135m"),
        (["demo", "--model", "/m/my model.gguf"], "demo", "my-model"),
        (["serve", "/m/tiny.gguf", "--port", "0"], "tiny", "tiny"),
        (["serve", "rack.yaml"], "rack", "chat"),
        (["serve", "vllm.yaml"], "vllm", None),
        (["serve", "nowhere.yaml", "--rack", "r"], "r", None),
    ],
)
def test_rack_and_model_are_told_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], rack: str, model: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rack.yaml").write_text("# a rack\nmodels:\n  - name: 'chat'  # as clients ask\n    path: /m/x.gguf\n")
    Path("vllm.yaml").write_text("models: \n- name: chat\n  path: /m/x\n  engine: vllm\n")
    told = understood(words)
    assert told is not None
    assert (told.rack or told.stem, told.first_model()) == (rack, model)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["plan", "m.gguf"],
        ["demo", "--help"],
        ["demo", "m.gguf"],
        ["serve"],
        ["serve", "a.gguf", "--detach"],
        ["serve", "a.gguf", "--rack", "a/b"],
    ],
)
def test_no_process_is_begun_for_what_starts_no_rack(words: list[str]) -> None:
    standby.begin(understood(words))
    assert not standby._waiting
