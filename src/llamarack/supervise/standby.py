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
from typing import NamedTuple

from llamarack.environment import ENGINE_KEY, KEEPER_MARK, LOG_FORMAT, engine_environment, gateway_environment

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


def begin(arguments: Sequence[str]) -> None:
    """For the command line of a command that starts a rack; does nothing for any other."""
    words = understood(arguments)
    if words is None:
        return
    is_ours = words.model is not None and not _CARDS.exists()
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
    if for_engine is None or words.model is None:
        return

    worker = [sys.executable, "-P", str(WORKER)]
    socket_of_engine = paths.keeper_socket(f"{slug(words.model)}-0")
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


class Words(NamedTuple):
    """What a command line says of the rack that it starts. `rack`: its name, else it is called after `stem`; `model`:
    what the first one is called, None where its engine is no worker of ours."""

    rack: str | None
    stem: str
    state_dir: Path | None
    model: str | None


def understood(arguments: Sequence[str]) -> Words | None:
    """None for a command that starts no rack here, and for words that it does not have: its own parser judges them. A
    wrong guess costs unused processes."""
    if not arguments or arguments[0] not in {"demo", "serve"}:
        return None
    options, rest = _sorted_out(arguments[1:])
    if options is None or len(rest) != (arguments[0] == "serve"):
        return None
    folder = options.get("--state-dir")
    state_dir = Path(folder) if folder else None
    if arguments[0] == "demo":
        model = options.get("--model")
        name = DEMO_NAME if model is None else _called(Path(model))
        return Words(options.get("--rack", "demo"), "", state_dir, name)
    target = Path(rest[0])
    served = _called(target) if target.suffix == ".gguf" else _first_name(target)
    return Words(options.get("--rack"), target.stem, state_dir, served)


def _called(model: Path) -> str:
    return model.stem.replace(" ", "-")


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
