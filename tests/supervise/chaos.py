"""Random faults over a running rack, and what clients meet meanwhile. The same seed gives the same order of faults.

At least one replica stays whole at every moment, as on a server that is not on fire: a replica that was struck, or that
carries a fault it will only show with a later request, does not count until another life of its engine is ready.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from llamarack.supervise.journal import Entry
from llamarack.supervise.replica import Replica
from llamarack.supervise.state import State
from tests.supervise.asking import Outcome, stream_once
from tests.supervise.conftest import RunningRack, order

_ORDER_FAULTS = (aiohttp.ClientError, OSError, AssertionError, TimeoutError)  # it died in this very moment
_LASTS_S = 0.5  # longer, and nearly every request would go to the replica that is never busy

Strike = Callable[[], Awaitable[bool]]


@dataclass
class Chaos:
    """`done`: strikes by kind; `lost`: what requests met that had not begun; `broken`: those that had begun to stream;
    `deaths`: what the journal made of it, by cause."""

    rack: RunningRack
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    answered: int = 0
    broken: int = 0
    _struck: set[str] = field(default_factory=set)  # keys of endpoints: an engine's next life has another
    _hanging: set[str] = field(default_factory=set)

    def take(self, entry: Entry) -> None:
        """For the journal's `on_entry`."""
        if entry.kind in {"died", "start_failed"}:
            self.deaths[str(entry.data["cause"])] += 1

    # -- faults -------------------------------------------------------------------------------------------------

    def faults(self) -> dict[str, Strike]:
        """By kind. A strike is False where nothing could be struck at the moment."""
        return {
            "killed": self._signalled(signal.SIGKILL),
            "terminated": self._signalled(signal.SIGTERM),
            "crashed": self._signalled(signal.SIGSEGV),
            "keeper killed": self._keeper_killed,
            "paused": self._paused,
            "hung": self._hung,
            "crashes after 3 tokens": self._ordered(crash_after=3),
            "closes its streams": self._ordered_for_a_while({"close_after": 2}, {"close_after": None}),
            "refuses": self._ordered_for_a_while({"refuse": 503}, {"refuse": 0}),
            "recycled": self._recycled,
            "disk full": self._disk_full_for_a_while,
        }

    async def strike_until(self, ends_monotonic_s: float) -> None:
        """Each kind once before any comes again, in an order of chance."""
        faults = self.faults()
        bag: list[str] = []
        while time.monotonic() < ends_monotonic_s:
            await asyncio.sleep(self.chance.uniform(0.2, 2.5))
            if not bag:
                bag = sorted(faults)
                self.chance.shuffle(bag)
            name = bag.pop(0)
            if await faults[name]():
                self.done[name] += 1
            else:
                bag.append(name)

    def _victim(self, *, fake_only: bool = False) -> Replica | None:
        """A ready one beside which another is whole. One that hangs is left for the supervisor to find."""
        ready = [each for each in self.rack.supervisor.replicas if each.state is State.READY]
        whole = [each for each in ready if _key(each) not in self._struck]
        allowed = [
            each
            for each in ready
            if any(other is not each for other in whole)
            and _key(each) not in self._hanging
            and (each.id.startswith("fake") or not fake_only)
        ]
        return self.chance.choice(allowed) if allowed else None

    def _signalled(self, number: signal.Signals) -> Strike:
        async def strike() -> bool:
            victim = self._victim()
            if victim is None or victim.child is None or victim.child.pid is None:
                return False
            self._struck.add(_key(victim))
            try:
                os.kill(victim.child.pid, number)
            except ProcessLookupError:
                return False
            return True

        return strike

    async def _keeper_killed(self) -> bool:
        victim = self._victim()
        if victim is None or victim.child is None or victim.child.keeper_pid is None:
            return False
        self._struck.add(_key(victim))
        try:
            os.kill(victim.child.keeper_pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    async def _paused(self) -> bool:
        victim = self._victim()
        pid = victim.child.pid if victim is not None and victim.child is not None else None
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(self.chance.uniform(0.1, 1.0))
            os.kill(pid, signal.SIGCONT)
        return True

    async def _hung(self) -> bool:
        """One at a time: it holds what it was given until it is found."""
        living = {_key(replica) for replica in self.rack.supervisor.replicas}
        return not living & self._hanging and await self._ordered(hang_engine=True)()

    def _ordered(self, **faults: object) -> Strike:
        async def strike() -> bool:
            victim = self._victim(fake_only=True)
            return victim is not None and await self._order(victim, **faults)

        return strike

    async def _order(self, victim: Replica, **faults: object) -> bool:
        """It counts as struck from now on; so does its next life, should that have taken the order."""
        self._struck.add(_key(victim))
        is_taken = True
        try:
            await order(victim, **faults)
        except _ORDER_FAULTS:
            is_taken = False
        self._struck.add(_key(victim))
        if is_taken and "hang_engine" in faults:
            self._hanging.add(_key(victim))
        return is_taken

    def _ordered_for_a_while(self, faults: dict[str, object], healed: dict[str, object]) -> Strike:
        async def strike() -> bool:
            victim = self._victim(fake_only=True)
            if victim is None or not await self._order(victim, **faults):
                return False
            struck = _key(victim)
            await asyncio.sleep(_LASTS_S)
            if await self._order(victim, **healed) and _key(victim) == struck:
                self._struck.discard(struck)
            return True

        return strike

    async def _recycled(self) -> bool:
        victim = self._victim()
        if victim is None:
            return False
        self._struck.add(_key(victim))
        victim.ask_recycle("chaos")
        return True

    async def _disk_full_for_a_while(self) -> bool:
        events = self.rack.supervisor.paths.events
        kept = events.with_suffix(".kept")
        events.replace(kept)
        events.symlink_to("/dev/full")
        await asyncio.sleep(0.5)
        events.unlink()
        kept.replace(events)
        return True

    # -- clients ------------------------------------------------------------------------------------------------

    async def ask_until(self, ends_monotonic_s: float) -> None:
        while time.monotonic() < ends_monotonic_s:
            begun_unix_s = time.time()
            outcome = await stream_once(self.rack.url, tokens=self.chance.randint(2, 20), timeout_s=120)
            self._judge(outcome, begun_unix_s)

    def _judge(self, outcome: Outcome, begun_unix_s: float) -> None:
        if outcome.fault is None:
            self.answered += 1
        elif outcome.has_begun:
            self.broken += 1
        else:
            entries = [each for each in self.rack.supervisor.journal.recent if each.time_unix_s >= begun_unix_s - 5]
            told = "\n".join(
                f"  {each.time_unix_s - begun_unix_s:+.2f} {each.kind} {each.replica}: {each.message}"
                for each in entries
            )
            waited_s = time.time() - begun_unix_s
            self.lost.append(f"{outcome.fault} {outcome.told} after {waited_s:.1f} s; meanwhile:\n{told}")
            print(f"lost: {self.lost[-1]}", flush=True)


def _key(replica: Replica) -> str:
    return replica.endpoint.key if replica.endpoint is not None else ""
