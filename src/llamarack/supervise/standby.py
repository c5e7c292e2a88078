"""Processes that are begun before it is known what they will do: keepers, each with a child that has its imports done.

A command that starts a rack imports, reads files and plans for a good part of a second before it can start anything.
Meanwhile its first engine worker and its first gateway worker come up on another core and wait to be told. Each is used
once, by the child with its control socket if that asks for just this program and environment; else it is ended, as it
is when its parent ends.

Imported before everything else of a command: it needs the standard library, functions import the rest.
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

from llamarack.environment import ENGINE_KEY, KEEPER_MARK, LOG_FORMAT, engine_environment, gateway_environment
from llamarack.supervise.start_words import StartWords

WORKER = Path(__file__).parents[1] / "engine" / "llamacpp_worker.py"
KEEPER = Path(__file__).with_name("keeper.py")
_LATE = frozenset({ENGINE_KEY, LOG_FORMAT})  # variables that are read only by one that was told
_CARDS = Path("/dev/nvidiactl")


class KeeperProcess:
    """One keeper that waits for its request. `inherit_fds`: what its child gets by the same numbers."""

    def __init__(self, inherit_fds: Sequence[int] = ()) -> None:
        self._requests, theirs = socket.socketpair()
        try:
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
        except OSError:
            self._requests.close()
            raise

    def say(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """`fds`: go with it, to a keeper that has a standby. One that has ended is found by its silence."""
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            sent = socket.send_fds(self._requests, [data], fds) if fds else 0
            self._requests.sendall(data[sent:])

    def close(self) -> None:
        """Nothing more will be said: a keeper without a request ends."""
        self._requests.close()

    def end(self) -> None:
        self.close()
        self.process.wait()


class Standby:
    def __init__(self, keeper: KeeperProcess, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.argv = list(argv)
        self.env = dict(env)
        self.keeper = keeper
        self.keeper.say({"standby": {"argv": [*argv, "--standby"], "env": self.env}})

    def suits(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        late = {name for name in {*env, *self.env} if self.env.get(name) != env.get(name)}
        is_alive = self.keeper.process.poll() is None
        return is_alive and list(argv[: len(self.argv)]) == self.argv and late <= _LATE

    def end(self) -> None:
        self.keeper.end()


_waiting: dict[str, Standby] = {}  # of this process, by control socket


def begin(words: StartWords | None) -> None:
    """For the command line of a command that starts a rack; None: it is of another one."""
    if words is None:
        return
    model = words.first_model()
    is_ours = model is not None and not _CARDS.exists()
    try:  # at once: their interpreters come up while it is found out what they are for
        for_gateway, for_engine = KeeperProcess(), KeeperProcess() if is_ours else None
    except OSError:  # it only saves time
        return

    from llamarack.errors import UsageError
    from llamarack.paths import rack_paths, slug

    try:
        paths = rack_paths(words.rack or slug(words.stem), words.state_dir)
    except UsageError:  # the command will say so
        for_gateway.end()
        if for_engine is not None:
            for_engine.end()
        return
    gateway = [sys.executable, "-m", "llamarack.gateway.worker"]
    _begin(for_gateway, paths.keeper_socket("gateway-0"), gateway, gateway_environment(os.environ))
    if for_engine is None or model is None:
        return

    worker = [sys.executable, "-P", str(WORKER)]
    socket_of_engine = paths.keeper_socket(f"{slug(model)}-0")
    _begin(for_engine, socket_of_engine, worker, engine_environment(os.environ, [], {}))


def _begin(keeper: KeeperProcess, control_socket: Path, argv: Sequence[str], env: Mapping[str, str]) -> None:
    _waiting[str(control_socket)] = Standby(keeper, argv, {**env, KEEPER_MARK: str(control_socket)})


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
