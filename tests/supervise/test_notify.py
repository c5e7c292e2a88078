"""systemd's side of the protocol, played by a datagram socket of the test."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamarack.supervise.notify import status_line, take_notifier
from llamarack.supervise.state import State

DEADLINE_S = 60.0


class Manager:
    def __init__(self, address: str | Path) -> None:
        self.heard: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(address))

    def until(self, wanted: Callable[[str], bool]) -> str:
        """The next message that is wanted; fails after the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self._socket.settimeout(deadline - time.monotonic())
            message = self._socket.recv(4096).decode()
            self.heard.append(message)
            if wanted(message):
                return message
        raise AssertionError(f"not heard: {self.heard}")

    def until_silent(self, seconds: float) -> None:
        """Takes what was under way; fails if signs of life go on."""
        self._socket.settimeout(seconds)
        deadline = time.monotonic() + DEADLINE_S
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < deadline:
                self._socket.recv(4096)
            raise AssertionError("still alive")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify.sock")
    yield manager
    manager.close()


@pytest.mark.process
def test_manager_hears_loading_ready_signs_of_life_and_the_drain(tmp_path: Path, manager: Manager) -> None:
    environment = {
        **os.environ,
        "NOTIFY_SOCKET": str(tmp_path / "notify.sock"),
        "WATCHDOG_USEC": "200000",
        "LLAMARACK_LOAD_LOCK": str(tmp_path / "lock"),
    }
    command = [sys.executable, "-m", "tests.fake_rack", str(tmp_path / "rack"), '[{"load_s": 0.5}, {}]']
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as rack:
        try:
            manager.until(lambda text: text.startswith("STATUS=0 of 2 replicas ready; "))
            manager.until(lambda text: text == "STATUS=2 of 2 replicas ready")
            manager.until(lambda text: text == "READY=1")
            assert "STOPPING=1" not in manager.heard
            for _ in range(3):
                manager.until(lambda text: text == "WATCHDOG=1")
            rack.send_signal(signal.SIGTERM)
            manager.until(lambda text: text == "STOPPING=1")
            assert any(text.startswith("STATUS=draining") for text in manager.heard)
            assert rack.wait(DEADLINE_S) == 0
        finally:
            rack.kill()


@pytest.mark.process
def test_supervisor_whose_loop_stands_still_gives_no_sign_of_life(tmp_path: Path, manager: Manager) -> None:
    """What the watchdog is for. SIGSTOP stands in for a loop that hangs."""
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify.sock"), "WATCHDOG_USEC": "200000"}
    environment["LLAMARACK_LOAD_LOCK"] = str(tmp_path / "lock")
    command = [sys.executable, "-m", "tests.fake_rack", str(tmp_path / "rack"), "[{}]"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as rack:
        try:
            manager.until(lambda text: text == "READY=1")
            rack.send_signal(signal.SIGSTOP)
            manager.until_silent(2.0)
            rack.send_signal(signal.SIGCONT)
            manager.until(lambda text: text == "WATCHDOG=1")
            rack.send_signal(signal.SIGTERM)
            rack.wait(DEADLINE_S)
        finally:
            rack.kill()


async def test_variables_are_taken_and_meant_for_one_process(tmp_path: Path) -> None:
    name = f"@llamarack-test-{os.getpid()}-{tmp_path.name}"
    manager = Manager("\0" + name[1:])  # the abstract form
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "100000", "WATCHDOG_PID": str(os.getpid())}
    notifier = take_notifier(environment)
    assert environment == {}
    assert notifier.watchdog_s == 0.1
    alive = asyncio.create_task(notifier.keep_alive())
    await asyncio.to_thread(manager.until, lambda text: text == "WATCHDOG=1")
    alive.cancel()
    manager.close()
    notifier.ready()  # nobody listens any more, and nothing happens
    others = take_notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"})
    assert others.watchdog_s is None
    assert take_notifier({"WATCHDOG_USEC": "100000"}).watchdog_s is None


def test_status_line_names_what_is_not_ready() -> None:
    states = [("a-0", State.READY), ("a-1", State.LOADING), ("b-0", State.FAILED)]
    assert status_line(states, draining=False, running=0) == "1 of 3 replicas ready; a-1 loading, b-0 failed"
    assert status_line(states, draining=True, running=4) == "draining: 4 requests running"
