"""Asks a child process a question and takes no answer after the deadline.

Drivers and network file systems block their caller inside the kernel, where no signal and no thread helps. So every
look at them is a module run as a child that prints one JSON object; a child that does not answer is killed and, where
even that does not end it, left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

_READING_S = 0.5


class Status(StrEnum):
    OK = "ok"
    HUNG = "hung"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`values`: the child's object, empty unless `status` is ok. `detail`: the last line of its complaint."""

    status: Status
    values: dict[str, Any] = field(default_factory=dict)
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What a child of a probe told, and how it ended."""

    status: Status
    events: tuple[dict[str, Any], ...]
    detail: str | None = None

    def named(self, event: str) -> list[dict[str, Any]]:
        return [values for values in self.events if values["event"] == event]


def module_command(module: str, *arguments: str) -> list[str]:
    # -P: a folder named like the package in the working directory is not imported instead of it.
    return [sys.executable, "-P", "-m", f"llamarack.hardware.{module}", *arguments]


class Probe:
    """One running child. It may be asked once, in one of three ways; the deadline counts from the start.

    `environment`: the child's whole environment; default: ours. Raises OSError where the command cannot start.
    """

    def __init__(
        self, command: Sequence[str], *, deadline_s: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self.deadline_s = deadline_s
        self._ends_monotonic_s = time.monotonic() + deadline_s
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def answer(self) -> Answer:
        """For a child that prints one object and ends."""
        status, output, detail = self._collect()
        if status is not Status.OK:
            return Answer(status=status, detail=detail)
        try:
            return Answer(status=Status.OK, values=json.loads(output))
        except ValueError:
            return Answer(status=Status.FAILED, detail=f"printed no JSON object: {output[:80]!r}")

    def events(self) -> Events:
        """For a child that prints one object per line as it goes; those printed before a hang are kept."""
        status, output, detail = self._collect()
        lines = [line for line in output.splitlines(keepends=True) if line.startswith(b"{") and line.endswith(b"\n")]
        return Events(status=status, events=tuple(json.loads(line) for line in lines), detail=detail)

    def text(self) -> str | None:
        """For a child that prints plain text; None unless it ended well."""
        status, output, _ = self._collect()
        return output.decode(errors="replace") if status is Status.OK else None

    def _collect(self) -> tuple[Status, bytes, str | None]:
        try:
            # Another probe may have used up the time while this one's answer lay ready.
            remaining_s = max(_READING_S, self._ends_monotonic_s - time.monotonic())
            output, errors = self._child.communicate(timeout=remaining_s)
        except subprocess.TimeoutExpired as expired:
            self.end()
            return Status.HUNG, expired.output or b"", f"no answer within {self.deadline_s:.3g} s"
        if self._child.returncode != 0:
            complaint = errors.decode(errors="replace").strip().rpartition("\n")[2]
            return Status.FAILED, output, complaint or f"exit status {self._child.returncode}"
        return Status.OK, output, None

    def end(self) -> None:
        """Kills the child's process group; does not wait for what the kernel holds."""
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for pipe in (self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()
        try:
            self._child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            pass


def ask(command: Sequence[str], *, deadline_s: float) -> Answer:
    return Probe(command, deadline_s=deadline_s).answer()
