"""Processes that are begun before it is known what they will do: keepers, each with a child that has its imports done.

A command that starts a rack imports, reads files and plans for a third of a second before it can start anything.
Meanwhile its first engine worker comes up on another core and waits to be told. It is used once, by the child with its
control socket if that asks for just this program and environment; else it is ended, as it is when its parent ends.

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

from llamarack.environment import ENGINE_KEY, KEEPER_MARK, engine_environment
from llamarack.supervise.start_words import StartWords

WORKER = Path(__file__).parents[1] / "engine" / "llamacpp_worker.py"
KEEPER = Path(__file__).with_name("keeper.py")
_LATE = frozenset({ENGINE_KEY})  # variables that are read only by one that was told
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

    def say(self, message: Mapping[str, object]) -> None:
        """One that has ended is found by its silence."""
        with contextlib.suppress(OSError):
            self._requests.sendall(json.dumps(message).encode() + b"\n")

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
    model = None if words is None else words.first_model()
    if words is None or model is None or _CARDS.exists():
        return
    try:  # at once: its interpreter comes up while it is found out what it is for
        keeper = KeeperProcess()
    except OSError:  # it only saves time
        return

    from llamarack.errors import UsageError
    from llamarack.paths import rack_paths, slug

    try:
        paths = rack_paths(words.rack or slug(words.stem), words.state_dir)
    except UsageError:  # the command will say so
        keeper.end()
        return
    worker = [sys.executable, "-P", str(WORKER)]
    _begin(keeper, paths.keeper_socket(f"{slug(model)}-0"), worker, engine_environment(os.environ, [], {}))


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
