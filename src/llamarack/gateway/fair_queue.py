"""Who of those that wait comes next: callers in turn by the tokens they got, first come first served within one.

Start-time fair queueing. A waiter whose request does not fit yet may be overtaken by smaller ones, but only so often.
Holds no futures and knows no clock: plain data for one owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waits(Protocol):
    """`overtaken`: by how many; changed by the queue. `first`: it ran already and lost its replica."""

    caller: str
    tokens: int
    overtaken: int
    first: bool


W = TypeVar("W", bound=Waits)

MOST_OVERTAKES = 32
_LOOK_AHEAD = 64
_KEPT_CALLERS = 1024


class FairQueue(Generic[W]):
    def __init__(self) -> None:
        self._lines: dict[str, deque[W]] = {}
        self._lost: deque[W] = deque()
        self._served: dict[str, float] = {}  # tokens given to each caller, on one common scale
        self._clock = 0.0  # where the caller served last stood
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._lines or self._lost)

    def __len__(self) -> int:
        return len(self._lost) + sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[W]:
        yield from self._lost
        for line in self._lines.values():
            yield from line

    def waiting(self, caller: str) -> int:
        return len(self._lines.get(caller, ()))

    def push(self, waiter: W) -> None:
        self.tokens += waiter.tokens
        if waiter.first:
            self._lost.append(waiter)
            return
        line = self._lines.setdefault(waiter.caller, deque())
        if not line:  # who comes back has no credit from the time away
            self._served[waiter.caller] = max(self._served.get(waiter.caller, 0.0), self._clock)
        line.append(waiter)

    def remove(self, waiter: W) -> bool:
        """Takes out one that gave up or was refused; False when it is not there."""
        line = self._lost if waiter.first else self._lines.get(waiter.caller)
        if line is None or waiter not in line:
            return False
        line.remove(waiter)
        self.tokens -= waiter.tokens
        self._forget_empty(waiter.caller)
        return True

    def in_turn(self) -> Iterator[W]:
        """In the order in which they should go on; stops behind one that may be overtaken no more."""
        for number, waiter in enumerate(self._order(), 1):
            yield waiter
            if waiter.overtaken >= MOST_OVERTAKES or number >= _LOOK_AHEAD:
                return

    def grant(self, waiter: W) -> None:
        """Takes `waiter` out as served; those before it in turn were overtaken."""
        for other in self._order():
            if other is waiter:
                break
            other.overtaken += 1
        if not waiter.first:
            self._clock = self._served[waiter.caller]
            self._served[waiter.caller] += waiter.tokens
        self.remove(waiter)

    def pushed_out(self, caller: str) -> W | None:
        """The newest waiter of the caller with the longest line, to whose place the newcomer of `caller`, who is in the
        queue, has the better claim; None where `caller` waits as often."""
        longest = max(self._lines.values(), key=len, default=None)
        if longest is None or len(longest) <= self.waiting(caller):
            return None
        return longest[-1]

    def _order(self) -> Iterator[W]:
        yield from list(self._lost)
        stand = {caller: self._served[caller] for caller in self._lines}
        at = dict.fromkeys(stand, 0)
        while stand:
            caller = min(stand, key=lambda each: stand[each])
            line, index = self._lines.get(caller, ()), at[caller]
            if index >= len(line):
                del stand[caller]
                continue
            waiter = line[index]
            at[caller] += 1
            stand[caller] += waiter.tokens
            yield waiter

    def _forget_empty(self, caller: str) -> None:
        if caller in self._lines and not self._lines[caller]:
            del self._lines[caller]
        if len(self._served) > _KEPT_CALLERS:
            self._served = {name: at for name, at in self._served.items() if name in self._lines or at > self._clock}
