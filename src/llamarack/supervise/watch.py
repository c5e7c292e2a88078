"""Looks at every ready engine at an interval: does it make progress, does its memory creep up?

Owns what it saw and acts through the replicas. One task per replica, so that an engine that does not answer delays the
look at no other; the host and the cards have theirs.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llamarack.config import Supervise
from llamarack.supervise.card_findings import Planned
from llamarack.supervise.card_watch import CardWatch
from llamarack.supervise.engine_usage import EngineUsage, family
from llamarack.supervise.host_watch import HostWatch
from llamarack.supervise.progress import Sight, Stillness, after, answered, is_overdue, limit_s
from llamarack.supervise.replica import Replica
from llamarack.supervise.state import State
from llamarack.units import format_bytes, format_duration

if TYPE_CHECKING:
    from llamarack.supervise.supervisor import Supervisor

_LOOK_TIMEOUT_S = 5.0
_QUESTION_TIMEOUT_S = 10.0
_FIRST_CARD_LOOK_S = 2.0
_LOOKS_PER_LIMIT = 4  # at least so many before an engine counts as hung


class Watch:
    def __init__(self, rack: Supervisor) -> None:
        self._rack = rack
        self._told_uncounted: set[str] = set()
        self.usage: dict[str, EngineUsage] = {}  # by replica, of the running engine
        self.host = HostWatch(rack.journal, rack.paths.folder)
        self.cards = CardWatch(
            rack.journal,
            rack.deployment.supervise.sample_s,
            owners=self.owners,
            planned=self._planned,
            engine_cores=self._cores_of,
            has_work=lambda replicas: any(self._in_flight(name) for name in replicas),
        )

    @property
    def _settings(self) -> Supervise:
        return self._rack.deployment.supervise  # a reload may change them

    async def run(self) -> None:
        """Until cancelled. A look that fails is told and begun anew: it is no reason to stop serving."""
        tasks: dict[Replica | str, asyncio.Task[None]] = {}
        try:
            while True:
                looks: dict[Replica | str, Callable[[], Coroutine[Any, Any, None]]] = {
                    "host": self._watch_host,
                    "cards": self._watch_cards,
                    # By the replica itself: after a change another one may have its name.
                    **{replica: partial(self._keep_looking, replica) for replica in self._rack.replicas},
                }
                for key in tasks.keys() - looks.keys():
                    tasks.pop(key).cancel()
                for name in self.usage.keys() - {replica.id for replica in self._rack.replicas}:
                    del self.usage[name]  # its pids may be somebody else's by now
                for key, look in looks.items():
                    if key not in tasks:
                        tasks[key] = asyncio.create_task(look(), name=f"watch {_name_of(key)}")
                going = [task for task in tasks.values() if not task.done()]  # without cards one ends by itself
                await asyncio.wait(going, timeout=self._settings.sample_s)
                failed = [
                    key for key, task in tasks.items() if task.done() and not task.cancelled() and task.exception()
                ]
                for key in failed:
                    error = tasks.pop(key).exception()
                    self._rack.journal.error(
                        "watch_failed",
                        f"the look at {_name_of(key)} failed: {error!r}; begun anew",
                        hint="a fault of llamarack: llamarack support collects what its makers need",
                        traceback=traceback.format_exception(error),
                    )
                if failed:
                    await asyncio.sleep(self._settings.sample_s)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _watch_host(self) -> None:
        while True:
            workers = self._rack.gateways.children.items()
            processes = {f"gateway {worker}": child.pid for worker, child in workers if child.pid and not child.exit}
            self.host.look({"supervisor": os.getpid(), **processes})
            await asyncio.sleep(self._settings.sample_s)

    async def _watch_cards(self) -> None:
        await asyncio.sleep(min(self._settings.sample_s, _FIRST_CARD_LOOK_S))  # the start has better to do
        await self.cards.run()

    async def _keep_looking(self, replica: Replica) -> None:
        while True:
            while replica.state is not State.READY:
                await replica.changed.wait()
            await self._while_ready(replica)

    async def _while_ready(self, replica: Replica) -> None:
        """From ready to anything else; what was seen of one engine says nothing of the next."""
        stillness = Stillness()
        limit = limit_s(self._settings.stuck_request_s, replica.spec.candidate.predicted.first_token_s)
        endpoint = replica.endpoint
        usage = self.usage[replica.id] = EngineUsage(replica.log_path)
        sampled_s = -math.inf
        while replica.state is State.READY and replica.endpoint is endpoint:
            sight = await self._look(replica)
            stillness = after(stillness, sight)
            if is_overdue(stillness, time.monotonic(), limit):
                if await self._answers(replica, min(limit / 2, _QUESTION_TIMEOUT_S)):
                    stillness = answered(stillness, time.monotonic(), self._in_flight(replica.id))
                elif replica.state is State.READY and replica.endpoint is endpoint:
                    self._condemn(replica, sight.in_flight, stillness)
                    return
            if time.monotonic() - sampled_s >= self._settings.sample_s and replica.child is not None:
                sampled_s = time.monotonic()
                usage.sample(replica.child.pid)
                self._judge_log(replica, usage)
                self._judge_memory(replica, usage)
            changed = asyncio.create_task(replica.changed.wait())
            await asyncio.wait({changed}, timeout=min(self._settings.sample_s, limit / _LOOKS_PER_LIMIT))
            changed.cancel()

    def _judge_log(self, replica: Replica, usage: EngineUsage) -> None:
        """An engine may run out of memory and live on, refusing what it is asked: it gets a smaller plan as well."""
        lines = usage.new_lines(replica.log_path)
        if not lines:
            return
        found = replica.spec.adaptor.diagnose("", lines)
        if found.cause == "out_of_memory":
            replica.condemn(found.cause, f"{found.message} while serving", found.hint)

    def _judge_memory(self, replica: Replica, usage: EngineUsage) -> None:
        """A leak is told once, and the engine recycled when another of its model takes the traffic meanwhile."""
        leak = usage.leak
        if leak is None:
            return
        if not usage.is_leak_told:
            usage.is_leak_told = True
            hourly = format_bytes(round(leak.bytes_per_s * 3600))
            self._rack.journal.warn(
                "leak",
                f"its memory grows by {hourly} an hour, steadily over {leak.samples} samples",
                replica=replica.id,
                hint="it is recycled when another replica can take its traffic; a newer engine may hold the cure",
                bytes_per_s=leak.bytes_per_s,
                samples=leak.samples,
            )
        peers = [each for each in self._rack.replicas if each.spec.model.name == replica.spec.model.name]
        if all(each.state is State.READY for each in peers) and len(peers) > 1:
            replica.ask_recycle("its memory grows steadily")

    def private_bytes(self, replica: str) -> int | None:
        """Host memory of a running engine that is nobody else's, at the last sample."""
        usage = self.usage.get(replica)
        return usage.samples[-1].memory_used_bytes if usage is not None and usage.samples else None

    def owners(self) -> dict[int, str]:
        """Of engines in every state: while one loads, its processes hold a card's memory already."""
        return {pid: replica.id for replica in self._rack.replicas for pid in _family_of(replica)}

    def _cores_of(self, replicas: Sequence[str]) -> float | None:
        known = [self.usage[name].cores for name in replicas if name in self.usage]
        told = [cores for cores in known if cores is not None]
        return sum(told) if told else None

    def _planned(self) -> dict[str, Planned]:
        high: dict[str, int] = {}
        for replica in self._rack.replicas:
            for card in replica.spec.candidate.cards:
                if card.uuid is not None:
                    high[card.uuid] = high.get(card.uuid, 0) + card.total_high_bytes
        return {uuid: Planned(high_bytes=high_bytes) for uuid, high_bytes in high.items()}

    async def _look(self, replica: Replica) -> Sight:
        progress, has_counters = await self._progress(replica)
        if not has_counters and replica.id not in self._told_uncounted:
            self._told_uncounted.add(replica.id)
            self._rack.journal.warn(
                "progress_unknown",
                "its metrics tell of no tokens, so an engine that hangs cannot be told from a busy one",
                replica=replica.id,
            )
        return Sight(
            at_monotonic_s=time.monotonic(),
            in_flight=self._in_flight(replica.id),
            progress=progress,
            has_counters=has_counters,
        )

    async def _progress(self, replica: Replica) -> tuple[int | None, bool]:
        from llamarack.supervise.engine_client import EngineClient, EngineRefused

        if replica.endpoint is None:
            return None, True
        try:
            async with EngineClient(replica.endpoint) as client:
                text = await client.metrics(timeout_s=_LOOK_TIMEOUT_S)
        except EngineRefused:
            return None, False
        except (OSError, TimeoutError):
            return None, True
        counters = replica.spec.adaptor.counters(text)
        told = [
            each for each in (counters.generated_tokens, counters.prompt_tokens, counters.steps) if each is not None
        ]
        return (sum(told), True) if told else (None, False)

    async def _answers(self, replica: Replica, timeout_s: float) -> bool:
        """One token, asked for directly: the last chance before it is ended."""
        from llamarack.supervise.engine_client import EngineClient, EngineRefused

        if replica.endpoint is None:
            return False
        try:
            async with asyncio.timeout(timeout_s), EngineClient(replica.endpoint) as client:
                await client.complete("Hello", max_tokens=1, timeout_s=timeout_s)
        except EngineRefused:
            return True  # whoever refuses is not hung
        except (OSError, TimeoutError):
            return False
        return True

    def _in_flight(self, replica: str) -> int:
        return self._rack.gateways.in_flight(replica)

    def _condemn(self, replica: Replica, in_flight: int, stillness: Stillness) -> None:
        assert stillness.since_monotonic_s is not None
        still_s = time.monotonic() - stillness.since_monotonic_s
        what = f"{in_flight} requests" if in_flight else "its requests had left"
        replica.condemn(
            "hung",
            f"no token for {format_duration(still_s)} ({what}), and no answer when asked",
            "the engine is ended and started again; its log may tell what it waited for",
        )


def _family_of(replica: Replica) -> list[int]:
    child = replica.child
    return family(child.pid) if child is not None and child.exit is None else []


def _name_of(watched: Replica | str) -> str:
    return watched if isinstance(watched, str) else watched.id
