"""Real keepers over real children: nothing outlives them, and they outlive their supervisor only so long."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llamarack.supervise import keeper, keeping
from llamarack.supervise.keeper import start_ticks
from llamarack.supervise.keeping import ChildSpec, attach_child, fetch_fds, start_child
from tests.supervise.oom_cgroup import memory_cgroup

pytestmark = pytest.mark.process
DEADLINE_S = 20.0


def _spec(tmp_path: Path, code: str, **more: object) -> ChildSpec:
    return ChildSpec(
        argv=[sys.executable, "-I", "-S", "-c", code],
        env={"PATH": os.environ["PATH"]},
        log_path=tmp_path / "child.log",
        control_socket=tmp_path / "k.sock",
        **more,  # type: ignore[arg-type]
    )


async def _until_logged(tmp_path: Path, word: str) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            text = (tmp_path / "child.log").read_text() if (tmp_path / "child.log").exists() else ""
            if word in text:
                return text
            await asyncio.sleep(0.01)


async def _until_gone(pid: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


async def test_exit_code_is_reported(tmp_path: Path) -> None:
    child = await start_child(_spec(tmp_path, "raise SystemExit(7)"))
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    assert child.exit is not None
    assert (child.exit.code, child.exit.signal, child.exit.asked) == (7, None, False)
    await child.release()
    assert child.keeper_pid is not None
    await _until_gone(child.keeper_pid)
    assert not (tmp_path / "k.sock").exists()


async def test_mark_is_told_to_who_is_there_and_to_who_comes_later(tmp_path: Path) -> None:
    code = (
        "import sys, time\nprint('not yet'); sys.stdout.flush(); sys.stdin.read()\n"
        "for part in ('it is li', 'stening on', ' x'): sys.stdout.write(part); sys.stdout.flush(); time.sleep(0.05)\n"
        "time.sleep(600)"
    )
    child = await start_child(_spec(tmp_path, code, up_mark="is listening on"))
    await asyncio.wait_for(child.up.wait(), DEADLINE_S)
    later = await attach_child(child.control_socket)
    assert later is not None
    await asyncio.wait_for(later.up.wait(), DEADLINE_S)
    later.detach()
    await child.stop()
    await child.release()
    unmarked = await start_child(_spec(tmp_path, "print('is listening on')", up_mark="is up"))
    await asyncio.wait_for(unmarked.exited.wait(), DEADLINE_S)
    assert not unmarked.up.is_set()
    await unmarked.release()


async def test_signal_is_reported(tmp_path: Path) -> None:
    child = await start_child(_spec(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    assert child.exit is not None
    assert child.exit.signal == signal.SIGSEGV
    await child.release()


async def test_program_that_is_not_there_is_reported_with_its_name_in_the_log(tmp_path: Path) -> None:
    spec = ChildSpec(
        argv=["/nowhere/llama-server"],
        env={},
        log_path=tmp_path / "child.log",
        control_socket=tmp_path / "k.sock",
    )
    child = await start_child(spec)
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    assert child.exit is not None
    assert child.exit.code == 127
    assert "/nowhere/llama-server" in (tmp_path / "child.log").read_text()
    await child.release()


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for new_session in (False, True):
    if os.fork() == 0:
        if new_session: os.setsid()
        if os.fork() == 0:          # an orphan, twice removed
            print("grandchild", os.getpid(), flush=True)
            time.sleep(600)
        os._exit(0)
print("ready", flush=True)
time.sleep(600)
"""


async def test_stop_ends_a_child_that_ignores_sigterm_and_its_orphans_in_other_sessions(tmp_path: Path) -> None:
    child = await start_child(_spec(tmp_path, STUBBORN))
    async with asyncio.timeout(DEADLINE_S):
        while (text := await _until_logged(tmp_path, "ready")).count("grandchild") < 2:
            await asyncio.sleep(0.01)
    grandchildren = [int(line.split()[1]) for line in text.splitlines() if line.startswith("grandchild")]
    exit = await child.stop(grace_s=0.2)
    assert exit.signal == signal.SIGKILL
    assert exit.asked
    assert not [pid for pid in grandchildren if psutil.pid_exists(pid)]
    await child.release()


async def test_stopped_process_is_ended_too(tmp_path: Path) -> None:
    child = await start_child(_spec(tmp_path, "import time; print('ready', flush=True); time.sleep(600)"))
    await _until_logged(tmp_path, "ready")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    exit = await child.stop(grace_s=0.2)
    assert exit.signal in (signal.SIGKILL, signal.SIGTERM)
    await child.release()


async def test_death_of_the_child_ends_its_family(tmp_path: Path) -> None:
    code = """
import os, time
if os.fork() == 0:
    print("rank", os.getpid(), flush=True); time.sleep(600)
time.sleep(0.3); os._exit(3)
"""
    child = await start_child(_spec(tmp_path, code))
    rank = int((await _until_logged(tmp_path, "rank")).split()[1])
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    assert child.exit is not None
    assert child.exit.code == 3
    assert not psutil.pid_exists(rank)
    await child.release()


async def test_killed_keeper_takes_child_and_orphans_with_it(tmp_path: Path) -> None:
    child = await start_child(_spec(tmp_path, STUBBORN))
    await _until_logged(tmp_path, "ready")
    assert child.keeper_pid is not None
    assert child.pid is not None
    os.kill(child.keeper_pid, signal.SIGKILL)
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    assert child.exit is not None
    assert child.exit.keeper_lost
    await _until_gone(child.pid)
    text = (tmp_path / "child.log").read_text()
    for line in text.splitlines():
        if line.startswith("grandchild"):
            await _until_gone(int(line.split()[1]))
    await child.release()


def _supervisor_that_dies(tmp_path: Path, code: str, lease_s: float) -> dict[str, int]:
    """Starts a child from a supervisor process, kills that process, returns the pids."""
    program = f"""
import asyncio, json, os, sys
from pathlib import Path
from llamarack.supervise import keeper, keeping
keeping.LEASE_S = {lease_s}
keeping.GRACE_S = 0.5
async def main():
    child = await keeping.start_child(keeping.ChildSpec(argv=[sys.executable, "-I", "-S", "-c", {code!r}],
        env={{}}, log_path=Path({str(tmp_path)!r}) / "child.log", control_socket=Path({str(tmp_path)!r}) / "k.sock"))
    print(json.dumps({{"child": child.pid, "keeper": child.keeper_pid}}), flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    pids: dict[str, int] = json.loads(done.stdout)
    return pids


async def test_supervisor_that_never_returns_ends_everything(tmp_path: Path) -> None:
    pids = await asyncio.to_thread(_supervisor_that_dies, tmp_path, "import time; time.sleep(600)", 0.5)
    await _until_gone(pids["child"])
    await _until_gone(pids["keeper"])
    assert not (tmp_path / "k.sock").exists()


def test_promised_thirty_seconds_hold_lease_grace_and_kill() -> None:
    assert keeping.LEASE_S + keeping.GRACE_S + 2.0 < 30.0


async def test_supervisor_that_returns_within_the_lease_finds_the_same_child(tmp_path: Path) -> None:
    pids = await asyncio.to_thread(_supervisor_that_dies, tmp_path, "import time; time.sleep(600)", 15.0)
    child = await attach_child(tmp_path / "k.sock")
    assert child is not None
    assert (child.pid, child.keeper_pid) == (pids["child"], pids["keeper"])
    assert child.start_ticks == start_ticks(pids["child"])
    await child.stop(grace_s=1)
    await child.release()
    await _until_gone(pids["keeper"])


async def test_exit_that_nobody_saw_is_told_to_the_supervisor_that_returns(tmp_path: Path) -> None:
    await asyncio.to_thread(_supervisor_that_dies, tmp_path, "raise SystemExit(5)", 15.0)
    child = await attach_child(tmp_path / "k.sock")
    assert child is not None
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    assert child.exit is not None
    assert child.exit.code == 5
    await child.release()


async def test_listening_socket_comes_back_from_the_keeper(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        spec = _spec(tmp_path, "import time; time.sleep(600)", inherit_fds=[listener.fileno()])
        child = await start_child(spec)
    (fd,) = await fetch_fds(tmp_path / "k.sock")
    with socket.socket(fileno=fd) as again:
        assert again.getsockname() == address
        with socket.create_connection(address, timeout=5):
            pass
    await child.stop(grace_s=1)
    await child.release()


async def test_nobody_listens_means_no_child(tmp_path: Path) -> None:
    assert await attach_child(tmp_path / "none.sock") is None


async def test_log_is_capped_and_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMARACK_LOG_MAX_BYTES", "64KiB")
    code = "for i in range(20000): print('line', i)"
    child = await start_child(_spec(tmp_path, code))
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    await child.release()
    parts = [tmp_path / "child.log", tmp_path / "child.log.1"]
    # A part is turned after the write that fills it, so each may exceed its half by one write.
    assert sum(part.stat().st_size for part in parts) < 3 * 65536
    assert parts[0].read_text().splitlines()[-1] == "line 19999"


@pytest.mark.fault("engine's log that cannot be written", "costs its lines, not the engine")
async def test_log_that_cannot_be_written_costs_lines_not_the_child(tmp_path: Path) -> None:
    (tmp_path / "child.log").mkdir()
    child = await start_child(_spec(tmp_path, "print('x' * 100000); raise SystemExit(4)"))
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    assert child.exit is not None
    assert child.exit.code == 4
    await child.release()


async def test_socket_of_an_earlier_child_is_removed_before_the_start_and_after_the_end(tmp_path: Path) -> None:
    stale = tmp_path / "engine.sock"
    stale.touch()
    code = f"import os, time; print('stale', os.path.exists({str(stale)!r}), flush=True); open({str(stale)!r}, 'w')"
    child = await start_child(_spec(tmp_path, code, unlink=[stale]))
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    assert "stale False" in (tmp_path / "child.log").read_text()
    await child.release()
    async with asyncio.timeout(DEADLINE_S):
        while stale.exists():
            await asyncio.sleep(0.01)


def test_keeper_runs_without_site_packages() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"not json\n")
        done = subprocess.run(
            [sys.executable, "-I", "-S", keeper.__file__],
            stdin=theirs.fileno(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert "JSONDecodeError" in done.stderr  # it came as far as reading its spec


# Moves its keeper and itself into a cgroup, lives there until the keeper has looked, and wants more than there is.
HUNGRY = """
import os, time
for pid in (os.getppid(), os.getpid()):
    open({procs!r}, "w").write(str(pid))
time.sleep(2.5)
kept = [bytearray(b"x" * 1048576) for _ in range(400)]
"""


async def test_kill_by_the_hosts_out_of_memory_killer_is_told_from_any_other(tmp_path: Path) -> None:
    with memory_cgroup(80 * 1024**2) as group:
        child = await start_child(_spec(tmp_path, HUNGRY.format(procs=str(group / "cgroup.procs"))))
        await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
        assert child.exit is not None
        assert (child.exit.signal, child.exit.oom_killed) == (signal.SIGKILL, True)
        await child.release()


async def test_kill_from_outside_is_not_laid_to_the_out_of_memory_killer(tmp_path: Path) -> None:
    child = await start_child(_spec(tmp_path, "import time; print('ready', flush=True); time.sleep(600)"))
    await _until_logged(tmp_path, "ready")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    await asyncio.wait_for(child.exited.wait(), DEADLINE_S)
    assert child.exit is not None
    assert (child.exit.signal, child.exit.oom_killed) == (signal.SIGKILL, False)
    await child.release()


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/app", "sys/fs/cgroup/app/memory.events", "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n"),
        ("0::/../gone", "sys/fs/cgroup/memory.events", "oom_kill 2\n"),
        ("4:cpu,memory:/a/b", "sys/fs/cgroup/memory/a/b/memory.oom_control", "under_oom 0\noom_kill 2\n"),
        ("4:memory:/docker/1", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill 2\n"),
    ],
)
def test_counter_of_oom_kills_is_found_in_both_cgroup_versions(tmp_path: Path, line: str, file: str, text: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(line + "\n")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert keeper.oom_kills(keeper.oom_counters(str(tmp_path))) == 2


def test_without_a_counter_nothing_is_said(tmp_path: Path) -> None:
    assert keeper.oom_counters(str(tmp_path)) == []
    assert keeper.oom_kills([]) is None
