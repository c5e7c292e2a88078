"""What is new goes before what is under way.

A step of an engine brings an event to each of its streams in the same moment. Passed on as they come, hundreds of them
hold up a request that has just arrived, or a first token, for which somebody waits. So what comes for a stream whose
first token is out waits for its turn: a few streams, then a look at what else has come. A stream that has two events
by then sends them in one piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

_AT_ONCE = 4  # streams, of some 50 microseconds each


class UnderWay(Protocol):
    def pass_on(self) -> None:
        """All that has come for it."""


class Turns:
    """The streams of one worker that have something to pass on, in the order in which it came."""

    __slots__ = ("_is_due", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[UnderWay] = deque()
        self._is_due = False

    def await_turn(self, stream: UnderWay) -> None:
        """Once, until its `pass_on` is called."""
        self._waiting.append(stream)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        waiting = self._waiting
        for _ in range(min(_AT_ONCE, len(waiting))):
            waiting.popleft().pass_on()
        if waiting:
            asyncio.get_running_loop().call_soon(self._serve)
        else:
            self._is_due = False
