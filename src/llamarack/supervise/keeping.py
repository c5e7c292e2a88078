"""Talks to keepers: starts one, attaches to one that outlived its supervisor, stops what it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.environment import KEEPER_MARK
from llamarack.logs import log_max_bytes
from llamarack.supervise import standby

# A keeper without a supervisor ends everything; with the grace this stays under the promised 30 s.
LEASE_S = 18.0
GRACE_S = 8.0
_ATTACH_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExit:
    """How a kept process ended. `code` or `signal` is set; `asked`: it was told to stop; `oom_near`: the host's
    out-of-memory killer struck in its cgroup just before."""

    code: int | None
    signal: int | None
    oom_killed: bool
    asked: bool
    keeper_lost: bool = False
    oom_near: bool = False

    @property
    def words(self) -> str:
        if self.keeper_lost:
            return "its keeper is gone"
        if self.oom_killed:
            return "killed by the host's out-of-memory killer"
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        return f"exit code {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What a keeper starts. `unlink`: sockets removed before the start and after the end. `up_mark`: what the child
    prints once it serves."""

    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    control_socket: Path
    unlink: Sequence[Path] = ()
    inherit_fds: Sequence[int] = ()
    up_mark: str | None = None


class KeptChild:
    """One attached keeper. `up` is set when the child has printed its mark, `ending` when the child itself has exited,
    `exited` when all its descendants are gone too: with a rank that does not end by itself that is a second later."""

    def __init__(self, control_socket: Path, keeper_pid: int | None) -> None:
        self.control_socket = control_socket
        self.keeper_pid = keeper_pid
        self.pid: int | None = None
        self.start_ticks: int | None = None
        self.ending_as: ChildExit | None = None
        self.exit: ChildExit | None = None
        self.up = asyncio.Event()
        self.ending = asyncio.Event()
        self.exited = asyncio.Event()
        self._state = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._keeper_collected: asyncio.Future[None] | None = None  # only where this process started the keeper

    async def stop(self, *, grace_s: float = GRACE_S, timeout_s: float = 60.0) -> ChildExit:
        """Ends the child and all it forked; returns when none is left. Raises TimeoutError if that takes too long."""
        self._send({"op": "stop", "grace_s": grace_s})
        async with asyncio.timeout(timeout_s):
            await self.exited.wait()
        assert self.exit is not None
        return self.exit

    async def release(self) -> None:
        """Lets the keeper go after the exit was taken note of, and waits until it has gone."""
        self._send({"op": "release"})
        waits = [wait for wait in (self._reading, self._keeper_collected) if wait is not None]
        await asyncio.wait(waits, timeout=_ATTACH_TIMEOUT_S)
        self.detach()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def detach(self) -> None:
        """Gives up the lease without stopping anything."""
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()

    def _send(self, message: dict[str, object]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader), name=f"keeper {self.control_socket.name}")
        self._send({"op": "attach"})
        async with asyncio.timeout(_ATTACH_TIMEOUT_S):
            await self._state.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                self._take(json.loads(line))
        if self.exit is None:
            # The keeper was killed; the child dies with it (PR_SET_PDEATHSIG), its descendants are swept here.
            lost = ChildExit(code=None, signal=None, oom_killed=False, asked=False, keeper_lost=True)
            self._ends_as(lost)
            await self._sweep()
            self.exit = lost
        self._state.set()
        self.exited.set()

    def _take(self, message: dict[str, object]) -> None:
        if message["event"] == "state":
            pid, ticks = message["pid"], message["start_ticks"]
            self.pid = pid if isinstance(pid, int) else None
            self.start_ticks = ticks if isinstance(ticks, int) else None
            self._state.set()
        elif message["event"] == "up":
            self.up.set()
        elif message["event"] in {"ending", "exit"}:
            code, number = message["code"], message["signal"]
            told = ChildExit(
                code=code if isinstance(code, int) else None,
                signal=number if isinstance(number, int) else None,
                oom_killed=message["oom_killed"] is True,
                asked=message["asked"] is True,
                oom_near=message.get("oom_near") is True,
            )
            self._ends_as(told)
            if message["event"] == "exit":
                self.exit = told
                self.exited.set()

    def _ends_as(self, told: ChildExit) -> None:
        self.ending_as = told
        self.ending.set()

    async def _sweep(self) -> None:
        """Kills what carries this keeper's mark in its environment; gives up after 10 s."""
        mark = keeper_mark(self.control_socket)
        for _ in range(200):
            marked = processes_marked(mark)
            if not marked:
                return
            for pid in marked:
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
            await asyncio.sleep(0.05)


def keeper_mark(control_socket: Path) -> str:
    """Environment entry that every descendant of a keeper inherits: an identity that no other process has."""
    return f"{KEEPER_MARK}={control_socket}"


def processes_marked(mark: str) -> list[int]:
    """Living processes of this user that carry `mark`, keepers excluded."""
    wanted = mark.encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:
            continue
    return found


async def start_child(spec: ChildSpec) -> KeptChild:
    """Starts a keeper and, through it, the child. The keeper is a session of its own and outlives this process."""
    environment = {**spec.env, KEEPER_MARK: str(spec.control_socket)}
    request = {
        "argv": list(spec.argv),
        "env": environment,
        "log_path": str(spec.log_path),
        "log_max_bytes": log_max_bytes(),
        "control_socket": str(spec.control_socket),
        "lease_s": LEASE_S,
        "grace_s": GRACE_S,
        "unlink": [str(path) for path in spec.unlink],
        "inherit_fds": list(spec.inherit_fds),
        "up_mark": spec.up_mark,
    }
    with contextlib.suppress(FileNotFoundError):
        spec.control_socket.unlink()
    started = None if spec.inherit_fds else standby.take(spec.argv, environment)
    if started is None:
        started = standby.KeeperProcess(spec.inherit_fds)  # asyncio's child would die with its loop
    started.say(request)
    started.close()
    process = started.process
    async with asyncio.timeout(_ATTACH_TIMEOUT_S):
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(spec.control_socket))
                break
            except OSError:
                if process.poll() is not None:
                    raise ChildProcessError(f"keeper ended with {process.returncode}") from None
                await asyncio.sleep(0.01)
    child = KeptChild(spec.control_socket, process.pid)
    child._keeper_collected = _collect_when_done(process)
    await child._attach(reader, writer)
    return child


async def attach_child(control_socket: Path) -> KeptChild | None:
    """The keeper that listens there, or None when nobody does."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(control_socket))
    except OSError:
        return None
    child = KeptChild(control_socket, _peer_pid(writer))
    try:
        await child._attach(reader, writer)
    except TimeoutError:
        child.detach()
        return None
    return child


async def fetch_fds(control_socket: Path) -> list[int]:
    """The file descriptors a keeper holds for its child, as descriptors of this process."""

    def receive() -> list[int]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ATTACH_TIMEOUT_S)
            connection.connect(str(control_socket))
            connection.sendall(b'{"op": "fds"}\n')
            _, fds, _, _ = socket.recv_fds(connection, 1024, 16)
            return list(fds)

    return await asyncio.to_thread(receive)


def _peer_pid(writer: asyncio.StreamWriter) -> int | None:
    raw: socket.socket = writer.get_extra_info("socket")
    try:
        credentials = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError:
        return None
    return int.from_bytes(credentials[:4], sys.byteorder)


def _collect_when_done(process: subprocess.Popen[bytes]) -> asyncio.Future[None]:
    """Waits for the keeper in the background so that it never stays a zombie of this process."""
    loop = asyncio.get_running_loop()
    collected: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(process.pid)

    def done() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.wait()
        if not collected.done():
            collected.set_result(None)

    loop.add_reader(pidfd, done)
    return collected
