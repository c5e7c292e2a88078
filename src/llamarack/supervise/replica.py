"""One replica: the single owner of its state, from the wait for the load lock to the last process gone.

`run()` is the loop; everybody else only asks (`ask_stop`, `ask_drain`, `ask_recycle`) or reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llamarack.config import Group
from llamarack.engine.adaptor import Diagnosis
from llamarack.engine.device_memory import TermCheck, term_checks
from llamarack.engine.dialect import Endpoint
from llamarack.errors import NeverReady
from llamarack.hardware.loadlock import LoadLock
from llamarack.paths import RackPaths
from llamarack.supervise.card_memory import CardMemory
from llamarack.supervise.card_share import require_shares
from llamarack.supervise.degrade import Rung
from llamarack.supervise.journal import Journal
from llamarack.supervise.keeping import GRACE_S, KeptChild
from llamarack.supervise.load_watch import look_at
from llamarack.supervise.loading import Load
from llamarack.supervise.log_tail import end_of, read_tail
from llamarack.supervise.post_mortem import (
    INTERNAL_ERROR,
    Condemned,
    Died,
    NoRoom,
    diagnose,
    is_short_of_memory,
    why_given_up,
)
from llamarack.supervise.replica_record import Death, Degraded, Remembered, ReplicaSpec
from llamarack.supervise.spawning import spawn
from llamarack.supervise.start_order import take_load_lock, until_room
from llamarack.supervise.state import Event, RestartPolicy, State, next_state
from llamarack.supervise.step_down import as_degraded, next_smaller
from llamarack.units import format_duration

T = TypeVar("T")
_ANSWER_POLL_S = 0.05
_CONDEMNED_GRACE_S = 1.0  # what does not answer will hardly end in order, and its requests wait
_LEAST_WARM_UP_S = 30.0
_END_TIMEOUT_S = 60.0
# A whole micro-batch on cards, where kernels are chosen by shape. On the processor vLLM compiles, for any length;
# llama.cpp does not, and sets its buffers aside for the longest prompt when it loads: docs/decisions/009.
_LONG_PROMPT_TOKENS = 512
_LONG_PROMPT_CPU_TOKENS = {"llamacpp": None}
_LONG_PROMPT_CPU_DEFAULT_TOKENS = 36


class World(Protocol):
    """What a replica needs of its surroundings; the supervisor supplies it."""

    paths: RackPaths
    journal: Journal
    restarts: RestartPolicy
    drain_s: float

    def changed(self) -> None: ...

    async def drained(self, replica: str, timeout_s: float) -> bool: ...

    async def card_free_bytes(self) -> Mapping[str, int | None]: ...

    async def card_shortage(self, spec: ReplicaSpec) -> str | None: ...

    async def plan_again(self, replica: str, group: Group, path: Path) -> ReplicaSpec: ...


class _Stop(Exception):
    """The replica was told to stop while it was doing something else."""


class _Recycle(Exception):
    """To be drained, ended and started anew, for the reason given."""


class Replica:
    def __init__(self, spec: ReplicaSpec, world: World) -> None:
        self.spec = spec
        self.asked_spec = spec  # as the file has it; `spec` is smaller after out of memory
        self.rungs: tuple[Rung, ...] = ()  # what was lowered since, oldest first
        self.state = State.STOPPED
        self.endpoint: Endpoint | None = None
        self.child: KeptChild | None = None
        self.load: Load | None = None  # of the newest start
        self.restarts = 0
        self.last_death: Death | None = None
        self.ready_since_unix_s: float | None = None
        self.memory_checks: tuple[TermCheck, ...] = ()  # the plan's terms beside the engine's, of the newest start
        self._log_from_bytes = 0  # where the newest start's part of the log begins
        self.cards = CardMemory(world.card_free_bytes, world.journal)
        self.start_seconds: float | None = None  # spawn to ready, of the newest start
        self._world = world
        self._deaths_monotonic_s: list[float] = []
        self._asked_stop = asyncio.Event()
        self._asked_drain = asyncio.Event()
        self._drain_s: float | None = None
        self._condemned: asyncio.Future[Diagnosis] | None = None  # while ready, as is the next
        self._recycled: asyncio.Future[str] | None = None
        self.changed = asyncio.Event()  # set at each transition, for those who wait

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def degraded(self) -> Degraded | None:
        """The smaller plan it runs with, None for the file's own."""
        return Degraded(rungs=self.rungs, group=self.spec.group, path=self.spec.path) if self.rungs else None

    @property
    def log_path(self) -> Path:
        return self._world.paths.log_of(self.id)

    def ask_stop(self) -> None:
        self._asked_stop.set()

    def ask_drain(self, within_s: float | None = None) -> None:
        """Finish what runs, for `within_s` at most (default: the rack's drain time), then stop."""
        self._drain_s = within_s
        self._asked_drain.set()

    def condemn(self, cause: str, message: str, hint: str | None) -> None:
        """End the running engine at once, as if it had died of `cause`; does nothing unless it is ready."""
        if self._condemned is not None and not self._condemned.done():
            self._condemned.set_result(Diagnosis(cause=cause, message=message, hint=hint))

    def ask_recycle(self, reason: str) -> None:
        """Finish what runs, end the engine and start it anew; does nothing unless it is ready."""
        if self._recycled is not None and not self._recycled.done():
            self._recycled.set_result(reason)

    async def run(self, adopted: KeptChild | None = None, remembered: Remembered | None = None) -> None:
        """Until it is asked to stop. Leaves no process behind, also when cancelled by a fault of ours."""
        try:
            if adopted is not None and remembered is not None:
                self.child, self.endpoint = adopted, remembered.endpoint
                self.restarts, self.last_death = remembered.restarts, remembered.last_death
                if (degraded := remembered.degraded) is not None:
                    self.spec = await as_degraded(self.spec, degraded, self._world.plan_again)
                    self.rungs = degraded.rungs
                if await self._life(adopt_ready=remembered.was_ready):
                    return
            while not await self._life():
                pass
        finally:
            if self.child is not None:  # a supervisor that is cancelled leaves its engines to the next one
                self.child.detach()

    async def _life(self, adopt_ready: bool | None = None) -> bool:
        """One start to its end. True: asked to stop; False: died and may be started again."""
        lock = LoadLock()
        try:
            if adopt_ready:
                self._step(Event.ADOPTED)
                self._world.journal.note("adopted", "taken back without a reload", replica=self.id)
            else:
                await self._bring_up(lock, adopted=adopt_ready is not None)
            lock.release()
            await self._while_ready()
        except _Stop:
            lock.release()
            await self._take_down()
            return True
        except _Recycle as reason:
            lock.release()
            self._world.journal.note("recycling", f"{reason}: finishes what runs and starts anew", replica=self.id)
            await self._take_down()
            self.restarts += 1
            return self.child is not None or self._asked_stop.is_set() or self._asked_drain.is_set()
        except Exception as error:  # a fault of our own is this replica's alone, and counts as its death
            await self._bury(error)
            lock.release()
            if self.child is None and await self._plan_smaller():
                return False
            return await self._wait_for_retry()
        finally:
            lock.release()
        return True

    async def _bring_up(self, lock: LoadLock, *, adopted: bool) -> None:
        if self.state is not State.STARTING:
            self._step(Event.START)
        if not adopted:
            await until_room(self.spec, self._world.card_shortage, self._world.journal, self._pause)
        await take_load_lock(lock, self.id, self._world.journal, self._pause)
        if self._asked_stop.is_set() or self._asked_drain.is_set():
            raise _Stop
        started = time.monotonic()
        self.load = Load(
            now_monotonic_s=started,
            deadline_s=self.spec.start_deadline_s,
            may_extend=self.spec.is_deadline_auto,
            weights_bytes=sum(card.terms.weights_bytes for card in self.spec.candidate.cards),
        )
        free_before: Mapping[str, int | None] = {}
        if not adopted:
            free_before = await self.cards.free_bytes(self.spec)
            self._log_from_bytes = end_of(self.log_path)
            spawned = await spawn(self.spec, self._world.paths, self._world.journal)
            self.child, self.endpoint = spawned.child, spawned.endpoint
        self._step(Event.SPAWNED)
        await self._unless_over(self._until_answers(self.load), None)
        self._step(Event.ANSWERED)
        deadline = started + self.spec.start_deadline_s
        if self.spec.is_deadline_auto:  # a load that moved may have used all of it, and more
            deadline = max(deadline, time.monotonic() + _LEAST_WARM_UP_S)
        await self._unless_over(self._warm_up(max(1.0, deadline - time.monotonic())), deadline)
        if free_before:
            await self.cards.note_held(self.spec, free_before)
            require_shares(self.spec.candidate.cards, self.cards.held_bytes)
        log_lines = read_tail(self.log_path, self._log_from_bytes)
        self.spec.adaptor.require_planned(self.spec.candidate, self.spec.group, log_lines)
        told = self.spec.adaptor.device_terms(log_lines)
        self.memory_checks = term_checks(self.spec.candidate.cards, told)
        self.start_seconds = time.monotonic() - started
        self.ready_since_unix_s = time.time()
        self._step(Event.WARMED)
        message = f"ready after {format_duration(self.start_seconds)}"
        checks = [asdict(check) for check in self.memory_checks]
        self._world.journal.note("ready", message, replica=self.id, seconds=self.start_seconds, memory=checks)

    async def _pause(self, seconds: float) -> None:
        """Raises _Stop when it is asked to stop meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wait_asked()
                raise _Stop

    async def _until_answers(self, load: Load) -> None:
        # Imported while the engine loads, as is the warm-up.
        from llamarack.supervise.engine_client import EngineClient

        assert self.endpoint is not None
        async with EngineClient(self.endpoint) as client:
            while not await client.is_up():
                if self.child is not None:
                    look_at(load, self.spec, self.child.pid, self.log_path, self._log_from_bytes, self._world.journal)
                await self._until_said_up(_ANSWER_POLL_S)

    async def _until_said_up(self, longest_s: float) -> None:
        """Most engines say nothing, and one that has said it may still not answer."""
        if self.child is None or self.child.up.is_set():
            await asyncio.sleep(longest_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self.child.up.wait()

    async def _warm_up(self, timeout_s: float) -> None:
        from llamarack.supervise.engine_client import EngineClient
        from llamarack.supervise.warmup import warm_up

        assert self.endpoint is not None
        longest = (
            _LONG_PROMPT_TOKENS
            if self.spec.card_uuids
            else _LONG_PROMPT_CPU_TOKENS.get(self.spec.adaptor.name, _LONG_PROMPT_CPU_DEFAULT_TOKENS)
        )
        async with EngineClient(self.endpoint) as client:
            await warm_up(
                client,
                long_prompt_tokens=longest and min(longest, self.spec.candidate.context_tokens // 2),
                timeout_s=timeout_s,
                has_template=self.spec.has_template,
            )

    async def _while_ready(self) -> None:
        """Returns only by raising: asked to stop, died, or condemned."""
        loop = asyncio.get_running_loop()
        condemned, recycled = self._condemned, self._recycled = loop.create_future(), loop.create_future()
        assert self.child is not None
        ending = asyncio.ensure_future(self.child.ending.wait())
        try:
            await self._unless_over(_any_of(condemned, recycled, ending), None)
            if condemned.done():
                raise Condemned(condemned.result())
            if recycled.done():
                raise _Recycle(recycled.result())
            assert self.child.ending_as is not None
            self._serves_no_more(Died(self.child.ending_as))
            await self.child.exited.wait()
            assert self.child.exit is not None
            raise Died(self.child.exit)
        finally:
            ending.cancel()
            self._condemned = self._recycled = None

    async def _unless_over(self, work: Coroutine[Any, Any, T], deadline_monotonic_s: float | None) -> T:
        """`work`, ended early by the child's death, by the deadline or by a request to stop."""
        assert self.child is not None
        task = asyncio.create_task(work)
        exited = asyncio.create_task(self.child.exited.wait())
        asked = asyncio.create_task(self._wait_asked())
        left_s = None if deadline_monotonic_s is None else max(0.0, deadline_monotonic_s - time.monotonic())
        try:
            await asyncio.wait({task, exited, asked}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                assert self.child.exit is not None
                raise Died(self.child.exit)
            if asked.done():
                raise _Stop
            if not task.done():
                raise NeverReady(
                    f"not ready within {format_duration(self.spec.start_deadline_s)}",
                    hint="supervise.start_deadline in seconds allows more; the log tells how far it came",
                )
            try:
                return task.result()
            except (OSError, TimeoutError):
                # A broken connection is often the first sign of a death whose report is on its way.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self.child.exited.wait()
                if self.child.exit is not None:
                    raise Died(self.child.exit) from None
                raise
        finally:
            for each in (task, exited, asked):
                each.cancel()
            await asyncio.gather(task, exited, asked, return_exceptions=True)

    async def _wait_asked(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._asked_stop, self._asked_drain)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _take_down(self) -> None:
        """Drains if it was ready and nobody insisted, then ends every process."""
        if self.state is State.READY:
            self._step(Event.DRAIN)
            within_s = self._world.drain_s if self._drain_s is None else self._drain_s
            waiting = asyncio.create_task(self._world.drained(self.id, within_s))
            insisted = asyncio.create_task(self._asked_stop.wait())
            exited = asyncio.create_task(self.child.exited.wait()) if self.child else insisted
            await asyncio.wait({waiting, insisted, exited}, return_when=asyncio.FIRST_COMPLETED)
            for each in (waiting, insisted, exited):
                each.cancel()
        self._step(Event.STOP)
        await self._end_child()
        self._step(Event.GONE)
        if self.child is None:
            self._world.journal.note("stopped", "stopped; no process is left", replica=self.id)

    async def _end_child(self, grace_s: float = GRACE_S) -> None:
        """All of it. What not even SIGKILL ends stays `child`, for its keeper to go on with."""
        if self.child is None:
            return
        if self.child.exit is None:
            free_bytes = await self.cards.free_bytes_if_told(self.spec)
            try:
                await self.child.stop(grace_s=grace_s, timeout_s=_END_TIMEOUT_S)
            except TimeoutError:
                self._world.journal.error(
                    "not_ended",
                    f"process {self.child.pid} or one of its own does not end, not even by SIGKILL",
                    replica=self.id,
                    hint="a driver that hangs may hold it in the kernel: sudo dmesg | grep -iE 'xid|nvrm'; then only a "
                    "reboot helps",
                )
                return
            await self.cards.until_back(self.spec, free_bytes)
        await self.child.release()
        self.child = None
        self.endpoint = None
        self.ready_since_unix_s = None

    def _serves_no_more(self, error: Exception) -> None:
        """Told at once, whatever of it is still to be ended: a request that is sent there meanwhile loses time."""
        # Without room nothing was started, and the log is that of the start before.
        tail = [] if isinstance(error, NoRoom) else read_tail(self.log_path, self._log_from_bytes)
        diagnosis = diagnose(error, tail, self.spec.adaptor)
        self.last_death = Death(
            at_unix_s=time.time(),
            while_state=State.READY if self.state is State.BACKOFF else self.state,
            cause=diagnosis.cause,
            message=diagnosis.message,
            hint=diagnosis.hint,
            log_tail=tuple(tail[-20:]),
        )
        if self.state is not State.BACKOFF:
            self._step(Event.DIED)

    async def _bury(self, error: Exception) -> None:
        """Records why it went down and makes sure that nothing of it is left."""
        self._serves_no_more(error)
        death = self.last_death
        assert death is not None
        await self._end_child(_CONDEMNED_GRACE_S if isinstance(error, Condemned) else GRACE_S)
        self._deaths_monotonic_s.append(time.monotonic())
        self._world.journal.error(
            "died" if death.while_state is State.READY else "start_failed",
            f"{death.message} (while {death.while_state})",
            replica=self.id,
            cause=death.cause,
            hint=death.hint,
            log=str(self.log_path),
            **({"traceback": traceback.format_exception(error)} if death.cause == INTERNAL_ERROR else {}),
        )

    async def _plan_smaller(self) -> bool:
        """After out of memory: True when the next start has a smaller plan."""
        death = self.last_death
        assert death is not None
        if not is_short_of_memory(death.cause, self.spec) or self.spec.model.on_out_of_memory == "fail":
            return False
        plan_again, journal = self._world.plan_again, self._world.journal
        found = await next_smaller(self.spec, self.asked_spec.path, self.rungs, death.cause, plan_again, journal)
        if found is None:
            return False
        self.spec, rung = found
        self.rungs = (*self.rungs, rung)
        self.restarts += 1
        journal.warn(
            "degraded",
            f"out of memory: {rung.words}; starts again with the smaller plan",
            replica=self.id,
            hint="the deployment file stays as it is; llamarack plan FILE shows what fits",
            setting=rung.setting,
            was=rung.was,
            becomes=rung.becomes,
            planned_bytes=sum(card.total_bytes for card in self.spec.candidate.cards),
        )
        self._step(Event.RETRY)
        return True

    async def _wait_for_retry(self) -> bool:
        """True: asked to stop meanwhile."""
        policy = self._world.restarts
        wait_s = policy.wait_s(self._deaths_monotonic_s, time.monotonic())
        hopeless = why_given_up(self.last_death.cause, self.spec) if self.last_death else None
        if self.child is not None:
            hopeless = "one of its processes does not end"
        if hopeless or wait_s is None:
            wait_s = None
            self._step(Event.GIVE_UP)
            times = f"died {len(self._deaths_monotonic_s)} times within {format_duration(policy.window_s)}"
            self._world.journal.error(
                "failed",
                f"{hopeless or times}; not started again",
                replica=self.id,
                hint="llamarack reload starts it again once the cause is gone",
            )
        try:
            async with asyncio.timeout(wait_s):
                await self._wait_asked()
        except TimeoutError:
            self.restarts += 1
            self._step(Event.RETRY)
            return False
        await self._end_child()
        self._step(Event.STOP)
        return True

    def _step(self, event: Event) -> None:
        self.state = next_state(self.state, event)
        self.changed.set()
        self.changed = asyncio.Event()
        self._world.changed()


async def _any_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
