"""Processes that are begun before it is known what they will do: keepers, each with a child that has its imports done.

A command that starts a rack imports, reads files and plans for a good part of a second before it can start anything.
Meanwhile its first engine worker and its first gateway worker come up on another core and wait to be told. Each is used
once, by the child with its control socket if that asks for just this program and environment; else it is ended, as it
is when its parent ends. An engine worker may even load ahead: see `ahead`.

Imported before everything else of a command: the standard library and what costs no more only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamarack.environment import ENGINE_KEY, KEEPER_MARK, LOG_FORMAT, engine_environment, gateway_environment
from llamarack.errors import UsageError
from llamarack.paths import RackPaths, rack_paths, slug
from llamarack.supervise.ahead import Ahead, take_ahead

if TYPE_CHECKING:
    from llamarack.hardware.loadlock import LoadLock

WORKER = Path(__file__).parents[1] / "engine" / "llamacpp_worker.py"
KEEPER = Path(__file__).with_name("keeper.py")
DEMO_NAME = "smollm2-135m"
_LATE = frozenset({ENGINE_KEY, LOG_FORMAT})  # variables that are read only by one that was told
_VALUES = frozenset({"--replicas", "--port", "--prompt", "--model", "--rack", "--state-dir", "--host", "--log-format"})
_FLAGS = frozenset({"--once"})
_CARDS = Path("/dev/nvidiactl")


class KeeperProcess:
    """One keeper that waits for its request. `inherit_fds`: what its child gets by the same numbers."""

    def __init__(self, inherit_fds: Sequence[int] = ()) -> None:
        self._requests, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KEEPER)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=list(inherit_fds),
                cwd="/",
            )

    def say(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """`fds`: go with it, to a keeper that has a standby. One that has ended is found by its silence."""
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            sent = socket.send_fds(self._requests, [data], fds) if fds else 0
            self._requests.sendall(data[sent:])

    def close(self) -> None:
        """Nothing more will be said: a keeper without a request ends."""
        self._requests.close()


class Standby:
    """`ahead`: what it loads already."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], ahead: Ahead | None = None) -> None:
        self.argv = list(argv)
        self.env = dict(env)
        self.ahead = ahead
        self.lock = None if ahead is None else ahead.lock  # until the replica has taken it over
        self.keeper = KeeperProcess()
        order = None if ahead is None else {"argv": ahead.argv, "env": env, "options": ahead.options}
        self.keeper.say({"standby": {"argv": [*argv, "--standby"], "env": self.env, "order": order}})

    def suits(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        if self.keeper.process.poll() is not None:
            return False
        late = {name for name in {*env, *self.env} if self.env.get(name) != env.get(name)}
        if self.ahead is not None:
            return not late and self.ahead.is_asked_for(argv)
        return list(argv[: len(self.argv)]) == self.argv and late <= _LATE

    def end(self) -> None:
        self.keeper.close()
        self.keeper.process.wait()
        if self.lock is not None:
            self.lock.release()


_waiting: dict[str, Standby] = {}  # of this process, by control socket


def begin(arguments: Sequence[str]) -> None:
    """For the command line of a command that starts a rack; does nothing for any other."""
    expected = expected_rack(arguments)
    if expected is None:
        return
    paths, replica = expected
    gateway = [sys.executable, "-m", "llamarack.gateway.worker"]
    _begin(paths.keeper_socket("gateway-0"), gateway, gateway_environment(os.environ))
    if replica is not None and not _CARDS.exists():
        worker = [sys.executable, "-P", str(WORKER)]
        ahead, key = take_ahead(paths, replica, worker), {}
        if ahead is not None:
            key = {ENGINE_KEY: ahead.key}
        _begin(paths.keeper_socket(replica), worker, engine_environment(os.environ, [], key), ahead)


def _begin(control_socket: Path, argv: Sequence[str], env: Mapping[str, str], ahead: Ahead | None = None) -> None:
    try:
        _waiting[str(control_socket)] = Standby(argv, {**env, KEEPER_MARK: str(control_socket)}, ahead)
    except OSError:  # it only saves time
        if ahead is not None:
            ahead.lock.release()


def ahead_of(control_socket: Path) -> Ahead | None:
    """What the one for this child loads already."""
    found = _waiting.get(str(control_socket))
    return None if found is None else found.ahead


def take_lock(control_socket: Path) -> LoadLock | None:
    """The load lock that the one for this child holds; the caller's from now on, whatever becomes of that one."""
    found = _waiting.get(str(control_socket))
    if found is None:
        return None
    lock, found.lock = found.lock, None
    return lock


def loading() -> list[Path]:
    """Control sockets of those that load ahead: their memory is taken for what is about to be planned."""
    return [Path(name) for name, each in _waiting.items() if each.ahead is not None]


def take(argv: Sequence[str], env: Mapping[str, str]) -> KeeperProcess | None:
    """The keeper that waits for a child with this mark in `env`. None: there is none, or it was begun for another one
    and has been ended."""
    found = _waiting.pop(env.get(KEEPER_MARK, ""), None)
    if found is None:
        return None
    if found.suits(argv, env):
        return found.keeper
    found.end()
    return None


def end() -> None:
    """All that were not used."""
    while _waiting:
        _waiting.popitem()[1].end()


def expected_rack(arguments: Sequence[str]) -> tuple[RackPaths, str | None] | None:
    """The rack that the command will start, and the first replica of it if that is a worker of ours, as far as the
    words tell. A wrong guess costs unused processes; the command's own parser judges the words.
    """
    if not arguments or arguments[0] not in {"demo", "serve"}:
        return None
    options, rest = _sorted_out(arguments[1:])
    if options is None or len(rest) != (arguments[0] == "serve"):
        return None
    if arguments[0] == "demo":
        model = options.get("--model")
        rack = options.get("--rack", "demo")
        name: str | None = DEMO_NAME if model is None else Path(model).stem.replace(" ", "-")
    else:
        target = Path(rest[0])
        rack = options.get("--rack", slug(target.stem))
        name = target.stem.replace(" ", "-") if target.suffix == ".gguf" else _first_name(target)
    folder = options.get("--state-dir")
    try:
        paths = rack_paths(rack, Path(folder) if folder else None)
    except UsageError:
        return None
    return paths, None if name is None else f"{slug(name)}-0"


def _sorted_out(words: Sequence[str]) -> tuple[dict[str, str] | None, list[str]]:
    """Options with their values, and the rest; None for a word that the commands above do not have."""
    options: dict[str, str] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, is_joined, value = word.partition("=")
        if name in _VALUES:
            options[name] = value if is_joined else next(left, "")
        elif word.startswith("-"):
            if word not in _FLAGS:
                return None, rest
        else:
            rest.append(word)
    return options, rest


def _first_name(file: Path) -> str | None:
    """Of the first model of a deployment file that names no other engine."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if any(word in text for word in ("vllm", "transformers", "engine_binary")):
        return None
    for line in text.splitlines():
        key, _, value = line.strip().removeprefix("- ").partition(":")
        if key.strip() == "name" and value.strip():
            return value.split(" #")[0].strip().strip("'\"")
    return None
