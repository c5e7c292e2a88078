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
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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


def module_command(module: str, *arguments: str) -> list[str]:
    # -P: a folder named like the package in the working directory is not imported instead of it.
    return [sys.executable, "-P", "-m", f"llamarack.hardware.{module}", *arguments]


class Probe:
    """One running child. `answer` may be asked once; the deadline counts from the start."""

    def __init__(self, command: Sequence[str], *, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._ends_monotonic_s = time.monotonic() + deadline_s
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def answer(self) -> Answer:
        try:
            remaining_s = max(0.0, self._ends_monotonic_s - time.monotonic())
            output, errors = self._child.communicate(timeout=remaining_s)
        except subprocess.TimeoutExpired:
            self.end()
            return Answer(status=Status.HUNG, detail=f"no answer within {self.deadline_s:g} s")
        complaint = errors.decode(errors="replace").strip().rpartition("\n")[2]
        if self._child.returncode != 0:
            return Answer(status=Status.FAILED, detail=complaint or f"exit status {self._child.returncode}")
        try:
            return Answer(status=Status.OK, values=json.loads(output))
        except ValueError:
            return Answer(status=Status.FAILED, detail=f"printed no JSON object: {output[:80]!r}")

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
