import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llamarack.errors import HardwareError, NeverReady
from llamarack.hardware.loadlock import PATH_VARIABLE, LoadLock


def test_lock_held_once_refuses_the_second_until_released(tmp_path: Path) -> None:
    first, second = LoadLock(path=tmp_path / "lock"), LoadLock(path=tmp_path / "lock")
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


def test_acquire_past_its_deadline_names_the_holder(tmp_path: Path) -> None:
    with LoadLock(path=tmp_path / "lock"), pytest.raises(NeverReady, match=f"process {os.getpid()} ") as caught:
        LoadLock(path=tmp_path / "lock").acquire(0)
    assert caught.value.hint
    assert str(tmp_path / "lock") in caught.value.hint


def test_acquire_waits_for_the_holder_to_leave(tmp_path: Path) -> None:
    first, second = LoadLock(path=tmp_path / "lock"), LoadLock(path=tmp_path / "lock", timeout_s=30)
    first.acquire()
    waiter = threading.Thread(target=second.acquire)
    waiter.start()
    assert waiter.is_alive()
    first.release()
    waiter.join(30)
    assert second.is_held
    second.release()


def test_lock_of_a_killed_process_is_free_again(tmp_path: Path) -> None:
    program = (
        "from llamarack.hardware.loadlock import LoadLock; import time\n"
        "lock = LoadLock(); lock.acquire(); print('held', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, PATH_VARIABLE: str(tmp_path / "lock")}
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"held\n"
        lock = LoadLock(path=tmp_path / "lock")
        assert not lock.try_acquire()
        child.kill()
        child.wait(10)
    lock.acquire(10)
    lock.release()


def test_lock_file_is_shared_between_users_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with LoadLock(path=tmp_path / "lock"):
            assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o666
    finally:
        os.umask(before)


def test_lock_of_a_deleted_file_does_not_count_as_held(tmp_path: Path) -> None:
    with LoadLock(path=tmp_path / "lock") as lock:
        (tmp_path / "lock").unlink()
        second = LoadLock(path=tmp_path / "lock")
        assert second.try_acquire()
        second.release()
        assert lock.is_held


@pytest.mark.parametrize("kind", ["symlink", "folder", "fifo"])
def test_lock_path_taken_by_something_else_is_refused(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "lock", tmp_path / "victim"
    victim.write_bytes(b"precious")
    {"symlink": lambda: path.symlink_to(victim), "folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(HardwareError, match="load lock") as caught:
        LoadLock(path=path).try_acquire()
    assert PATH_VARIABLE in str(caught.value.hint)
    assert victim.read_bytes() == b"precious"
