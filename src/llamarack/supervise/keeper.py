"""Owns one child process and everything it forks; ends all of it when no supervisor is left.

Standard library only and run as a plain file (`python -I -S keeper.py`), so that it stays small and starts at once.
The spec comes as one JSON object and line on stdin, a socket: `argv, env, log_path, log_max_bytes, control_socket,
lease_s, grace_s, unlink, inherit_fds, up_mark`. It listens on `control_socket`, one JSON object a line:

    {"op": "attach"}               -> {"event": "state", ...}; {"event": "up"} once the child has printed `up_mark`;
                                      {"event": "ending"} once the child itself has exited, and
                                      {"event": "exit", ...} when nothing of it is left; holds the lease
    {"op": "stop", "grace_s": 10}  -> SIGTERM, after `grace_s` SIGKILL, to the child and all its descendants
    {"op": "fds"}                  -> one message that carries `inherit_fds`, for a supervisor that came back
    {"op": "release"}              -> after the exit was reported: the keeper's work is done

A first line of stdin may be `{"standby": {"argv", "env"}}` instead: a child to start at once, which waits until the
spec comes and gets its argv and env as a line on its own stdin. With no spec it is ended.

The lease: while no connection has attached for `lease_s`, everything is ended. The child is gone only when no
descendant is left; orphans come to the keeper because it is their subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

TYPE_CHECKING = False  # typing's own, without the import: a start waits for this one
if TYPE_CHECKING:
    from typing import IO, Any

PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_LOG_CHUNK_BYTES = 65536
_KILL_POLL_S = 0.02
_OOM_LOOK_S = 1.0
_OOM_NEAR_S = 10.0  # a large process takes seconds to be torn down


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _die_with_keeper() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _spawn(argv: list[str], env: dict[str, str], inherit_fds: list[int], stdin: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        env=env,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        process_group=0,
        pass_fds=inherit_fds,
        preexec_fn=_die_with_keeper,
    )


def oom_counters(root: str = "/") -> list[str]:
    """Files that count the host's OOM kills in this process's cgroup: v2's memory.events, v1's memory.oom_control. A
    kill counts in its victim's group whosever limit was met; a container may see its own group as the mount's top."""
    try:
        lines = _text(os.path.join(root, "proc/self/cgroup")).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, name = "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        own, top = os.path.join(root, mount, group.lstrip("/"), name), os.path.join(root, mount, name)
        found += [path for path in (own, top) if os.path.isfile(path)][:1]
    return found


def oom_kills(counters: list[str]) -> int | None:
    """The sum over `counters`; it only matters whether it rises. None where none can be read."""
    total = None
    for path in counters:
        with contextlib.suppress(OSError, ValueError):
            for line in _text(path).splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    total = (total or 0) + int(count)
    return total


def start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (/proc/PID/stat, field 22); with the pid it is an identity."""
    try:
        return int(_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def descendants(root: int) -> list[int]:
    """Living processes below `root`, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            state, parent = _text(f"/proc/{entry}/stat").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


class Requests:
    """Lines from stdin."""

    def __init__(self) -> None:
        self._data = b""

    def line(self) -> dict[str, Any] | None:
        """The next one; None at the end."""
        while b"\n" not in self._data:
            part = os.read(0, 65536)
            if not part:
                return None
            self._data += part
        line, _, self._data = self._data.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        return value


class Standby:
    """A child that waits on its stdin for what it shall do."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._child = _spawn(argv, env, [], theirs.fileno())

    def told(self, spec: dict[str, Any]) -> subprocess.Popen[bytes]:
        with contextlib.suppress(OSError):  # its death is seen as any child's
            self._orders.sendall(json.dumps({"argv": spec["argv"], "env": spec["env"]}).encode() + b"\n")
        self._orders.close()
        return self._child

    def end(self) -> None:
        self._child.kill()
        self._child.wait()


class CappedLog:
    """Append-only file of at most `max_bytes`, older part beside it. A full disk loses lines, not the child."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: int | None = None
        self._size = 0
        self.lost_bytes = 0

    def write(self, data: bytes) -> None:
        try:
            if self._file is None or self._size >= self._max_bytes // 2:
                self._turn()
            assert self._file is not None
            os.write(self._file, data)
            self._size += len(data)
        except OSError:
            self.lost_bytes += len(data)

    def _turn(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            os.replace(self._path, self._path + ".1")
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size


class Keeper:
    """One selector loop; every field is touched only by it."""

    def __init__(self, spec: dict[str, Any], standby: Standby | None = None) -> None:
        self._spec = spec
        self._selector = selectors.DefaultSelector()
        self._log = CappedLog(spec["log_path"], spec["log_max_bytes"])
        self._attached: set[socket.socket] = set()
        self._lines: dict[socket.socket, bytes] = {}
        self._lease_from = time.monotonic()
        self._kill_at: float | None = None
        self._up_mark = (spec.get("up_mark") or "").encode()
        self._before_mark = b""
        self._is_up = False
        self._stop_asked = False
        self._exit: dict[str, Any] | None = None
        self._released = False
        self._oom_counters = oom_counters()
        self._oom_kills = oom_kills(self._oom_counters)
        self._oom_seen_at: float | None = None
        self._oom_look_at = 0.0
        self._listener = self._listen(spec["control_socket"])
        self._wake = self._wake_on_signals()
        self._child = self._start() if standby is None else self._listened_to(standby.told(spec))

    def run(self) -> None:
        while not self._released:
            for key, _ in self._selector.select(self._wait_s()):
                key.data(key.fileobj)
            self._reap()
            self._advance()
        for path in [self._spec["control_socket"], *self._spec["unlink"]]:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _listen(self, path: str) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(path)
        listener.listen(8)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return listener

    def _wake_on_signals(self) -> socket.socket:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._wake_writer = writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._stop(self._spec["grace_s"]))
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        self._selector.register(reader, selectors.EVENT_READ, self._drain_wake)
        return reader

    def _drain_wake(self, reader: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            reader.recv(4096)

    def _start(self) -> subprocess.Popen[bytes] | None:
        for path in self._spec["unlink"]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        try:
            child = _spawn(self._spec["argv"], self._spec["env"], self._spec["inherit_fds"], subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            self._log.write(f"keeper: `{self._spec['argv'][0]}` cannot be started: {error}\n".encode())
            self._exit = {"event": "exit", "code": 127, "signal": None, "oom_killed": False, "asked": False}
            return None
        return self._listened_to(child)

    def _listened_to(self, child: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._selector.register(child.stdout, selectors.EVENT_READ, self._read_output)
        return child

    def _read_output(self, pipe: IO[bytes]) -> None:
        try:
            data = os.read(pipe.fileno(), _LOG_CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            self._log.write(data)
            self._look_for_mark(data)
        else:
            self._selector.unregister(pipe)
            pipe.close()

    def _look_for_mark(self, data: bytes) -> None:
        if self._is_up or not self._up_mark:
            return
        seen = self._before_mark + data
        self._before_mark = seen[-len(self._up_mark) :]  # a write may end within it
        if self._up_mark in seen:
            self._is_up = True
            self._tell({"event": "up"})

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(1.0)
            self._lines[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ, self._receive)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._forget(connection)
            return
        *lines, self._lines[connection] = (self._lines[connection] + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            self._obey(connection, message)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._lines.pop(connection, None)
        if connection in self._attached:
            self._attached.discard(connection)
            self._lease_from = time.monotonic()

    def _obey(self, connection: socket.socket, message: dict[str, Any]) -> None:
        match message.get("op"):
            case "attach":
                self._attached.add(connection)
                pid = self._child.pid if self._child else None
                self._send(connection, {"event": "state", "pid": pid, "start_ticks": start_ticks(pid) if pid else None})
                if self._is_up:
                    self._send(connection, {"event": "up"})
                if self._exit is not None:
                    self._send(connection, self._exit)
                elif self._child is not None and self._child.returncode is not None:
                    self._send(connection, self._ended("ending"))
            case "stop":
                self._stop(float(message.get("grace_s", self._spec["grace_s"])))
            case "fds":
                with contextlib.suppress(OSError):
                    socket.send_fds(connection, [b'{"event": "fds"}\n'], self._spec["inherit_fds"])
            case "release":
                self._released = self._exit is not None

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in self._attached:
            self._send(connection, message)

    def _send(self, connection: socket.socket, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(message).encode() + b"\n")

    def _stop(self, grace_s: float) -> None:
        self._stop_asked = True
        self._signal_all(signal.SIGTERM)
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _signal_all(self, number: int) -> None:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _reap(self) -> None:
        """Collects every zombie. The child's own exit ends the rest of its family; with the last of it, the exit is
        reported: a process without children has no descendants, since orphans become its children.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if self._exit is None and self._child is not None and self._child.returncode is not None:
                    self._report_exit()
                return
            if pid == 0:
                return
            if self._child is not None and pid == self._child.pid:
                self._child.returncode = os.waitstatus_to_exitcode(status)
                self._tell(self._ended("ending"))
                self._stop_family()

    def _stop_family(self) -> None:
        self._signal_all(signal.SIGTERM)
        soon = time.monotonic() + 1.0
        self._kill_at = soon if self._kill_at is None else min(self._kill_at, soon)

    def _ended(self, event: str) -> dict[str, Any]:
        """How the child itself ended."""
        assert self._child is not None
        code = self._child.returncode
        self._look_for_oom_kills()
        struck = self._oom_seen_at is not None and time.monotonic() - self._oom_seen_at < _OOM_NEAR_S
        return {
            "event": event,
            "code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "oom_killed": struck and code == -signal.SIGKILL,
            "oom_near": struck,  # a rank that was killed takes its parent down with an exit code
            "asked": self._stop_asked,
        }

    def _report_exit(self) -> None:
        if self._child is not None and self._child.stdout is not None and not self._child.stdout.closed:
            self._read_output(self._child.stdout)
        self._exit = self._ended("exit")
        self._kill_at = None
        self._tell(self._exit)

    def _look_for_oom_kills(self) -> None:
        """Often, since only a kill at about the time of the death is its cause: the group may hold others."""
        counters = oom_counters()
        count = oom_kills(counters)
        is_same_group = counters == self._oom_counters  # a process can be moved to another
        if is_same_group and count is not None and self._oom_kills is not None and count > self._oom_kills:
            self._oom_seen_at = time.monotonic()
        self._oom_counters, self._oom_kills = counters, count

    def _advance(self) -> None:
        now = time.monotonic()
        if now >= self._oom_look_at:
            self._oom_look_at = now + _OOM_LOOK_S
            self._look_for_oom_kills()
        if self._kill_at is not None and now >= self._kill_at:
            self._signal_all(signal.SIGKILL)
        if not self._attached and now >= self._lease_from + self._spec["lease_s"]:
            if self._exit is not None:
                self._released = True
            elif not self._stop_asked:
                self._stop(self._spec["grace_s"])

    def _wait_s(self) -> float:
        if self._child is not None and self._child.returncode is not None and self._exit is None:
            return _KILL_POLL_S  # an orphan's death may raise no SIGCHLD before it is ours
        if self._kill_at is not None:
            return max(_KILL_POLL_S, min(0.5, self._kill_at - time.monotonic()))
        return 1.0


def main() -> None:
    if _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        sys.exit("keeper: prctl(PR_SET_CHILD_SUBREAPER) refused")
    requests = Requests()
    request, standby = requests.line(), None
    if request is not None and "standby" in request:
        standby = Standby(**request["standby"])
        request = requests.line()
        if request is None:  # who would have sent it is gone, or needs another child
            standby.end()
    if request is not None:
        os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
        Keeper(request, standby).run()


if __name__ == "__main__":
    main()
