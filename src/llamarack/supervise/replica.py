"""One replica: the single owner of its state, from the wait for the load lock to the last process gone.

`run()` is the loop; everybody else only asks (`ask_stop`, `ask_drain`, `ask_start`) or reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llamarack.config import Group
from llamarack.engine.adaptor import Diagnosis, Endpoint, LaunchContext
from llamarack.engine.device_memory import TermCheck, term_checks
from llamarack.errors import LlamarackError, NeverReady
from llamarack.hardware.host import read_cgroup_limits, read_host
from llamarack.hardware.loadlock import LoadLock
from llamarack.paths import RackPaths, make_private
from llamarack.supervise.card_share import held_bytes, require_shares
from llamarack.supervise.degrade import OUT_OF_MEMORY, Rung, smaller_plans
from llamarack.supervise.journal import Journal
from llamarack.supervise.keeping import GRACE_S, ChildExit, ChildSpec, KeptChild, start_child
from llamarack.supervise.replica_record import Death, Degraded, Remembered, ReplicaSpec
from llamarack.supervise.state import Event, RestartPolicy, State, next_state
from llamarack.units import format_bytes, format_duration

T = TypeVar("T")
_LOAD_LOCK_POLL_S = 0.1
_ANSWER_POLL_S = 0.05
_LOG_TAIL_BYTES = 262_144  # every rank of a vLLM prints some 10 KB of traceback after the line that tells the cause
# A whole micro-batch on cards, where kernels are chosen by shape; on the CPU nothing is compiled, and a long prompt
# would only make every start a second longer.
_LONG_PROMPT_TOKENS = 512
_LONG_PROMPT_CPU_TOKENS = 36
# Causes that the same start meets again; the rest may pass.
_HOPELESS = frozenset(
    {
        *("model_file_damaged", "missing_tokenizer", "unsupported_architecture", "unsupported_quantization"),
        *("bad_option", "context_too_long", "heads_not_divisible", "kv_cache_too_small", "kv_dtype_needs_bfloat16"),
        *("unsupported_kv_dtype", "driver_too_old"),
    }
)


class World(Protocol):
    """What a replica needs of its surroundings; the supervisor supplies it."""

    paths: RackPaths
    journal: Journal
    restarts: RestartPolicy
    drain_s: float

    def changed(self) -> None: ...

    async def drained(self, replica: str, timeout_s: float) -> bool: ...

    async def card_free_bytes(self) -> Mapping[str, int | None]: ...

    async def plan_again(self, replica: str, group: Group, path: Path) -> ReplicaSpec: ...


class _Stop(Exception):
    """The replica was told to stop while it was doing something else."""


class _Died(Exception):
    def __init__(self, exit: ChildExit) -> None:
        super().__init__(exit.words)
        self.exit = exit


class Replica:
    def __init__(self, spec: ReplicaSpec, world: World) -> None:
        self.spec = spec
        self.asked_spec = spec  # as the file has it; `spec` is smaller after out of memory
        self.rungs: tuple[Rung, ...] = ()  # what was lowered since, oldest first
        self.state = State.STOPPED
        self.endpoint: Endpoint | None = None
        self.child: KeptChild | None = None
        self.restarts = 0
        self.last_death: Death | None = None
        self.ready_since_unix_s: float | None = None
        self.memory_checks: tuple[TermCheck, ...] = ()  # the plan's terms beside the engine's, of the newest start
        self._log_from_bytes = 0  # where the newest start's part of the log begins
        self.card_held_bytes: dict[str, int] = {}  # by UUID, what the newest start took
        self.start_seconds: float | None = None  # spawn to ready, of the newest start
        self._world = world
        self._deaths_monotonic_s: list[float] = []
        self._asked_stop = asyncio.Event()
        self._asked_drain = asyncio.Event()
        self._asked_start = asyncio.Event()
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

    def ask_drain(self) -> None:
        """Finish what runs, then stop."""
        self._asked_drain.set()

    def ask_start(self) -> None:
        """Out of `failed`, with the deaths forgotten and with the plan of the file."""
        self._deaths_monotonic_s.clear()
        self.spec, self.rungs = self.asked_spec, ()
        self._asked_start.set()

    async def run(self, adopted: KeptChild | None = None, remembered: Remembered | None = None) -> None:
        """Until it is asked to stop. Leaves no process behind, also when cancelled by a fault of ours."""
        try:
            if adopted is not None and remembered is not None:
                self.child, self.endpoint = adopted, remembered.endpoint
                self.restarts, self.last_death = remembered.restarts, remembered.last_death
                await self._resume(remembered.degraded)
                if await self._life(adopt_ready=remembered.was_ready):
                    return
            while not await self._life():
                pass
        except asyncio.CancelledError:
            if self.child is not None:
                self.child.detach()  # a supervisor that is killed leaves its engines to the next one
            raise

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
        except (_Died, NeverReady, LlamarackError, OSError, TimeoutError) as error:
            await self._bury(error)
            lock.release()
            if await self._plan_smaller():
                return False
            return await self._wait_for_retry()
        finally:
            lock.release()
        return True

    async def _bring_up(self, lock: LoadLock, *, adopted: bool) -> None:
        if self.state is not State.STARTING:
            self._step(Event.START)
        await self._take_lock(lock)
        started = time.monotonic()
        deadline = started + self.spec.start_deadline_s
        free_before: Mapping[str, int | None] = {}
        if not adopted:
            free_before = await self._card_free_bytes()
            self.child = await self._spawn()
        self._step(Event.SPAWNED)
        await self._unless_over(self._until_answers(), deadline)
        self._step(Event.ANSWERED)
        await self._unless_over(self._warm_up(max(1.0, deadline - time.monotonic())), deadline)
        if free_before:
            self.card_held_bytes = held_bytes(free_before, await self._card_free_bytes())
            require_shares(self.spec.candidate.cards, self.card_held_bytes)
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

    async def _take_lock(self, lock: LoadLock) -> None:
        """One load at a time on this machine, whoever starts it."""
        told = False
        while not lock.try_acquire():
            if not told:
                holder = lock.holder_pid()
                by = f" (process {holder})" if holder and holder != os.getpid() else ""
                self._world.journal.note("load_waits", f"waits for another load to end{by}", replica=self.id)
                told = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOAD_LOCK_POLL_S):
                    await self._wait_asked()
                    raise _Stop
        if self._asked_stop.is_set() or self._asked_drain.is_set():
            raise _Stop

    async def _spawn(self) -> KeptChild:
        spec, paths = self.spec, self._world.paths
        socket = paths.engine_socket(self.id)
        context = LaunchContext(
            replica=self.id,
            model=spec.model,
            group=spec.group,
            path=spec.path,
            candidate=spec.candidate,
            card_uuids=spec.card_uuids,
            files=make_private(paths.folder / "replicas" / self.id),
            socket=socket,
            key=secrets.token_urlsafe(32),
        )
        # In a thread: an engine that was updated meanwhile is asked for its options first.
        launch = await asyncio.to_thread(spec.adaptor.launch, context)
        self.endpoint = launch.endpoint
        self._log_from_bytes = self.log_path.stat().st_size if self.log_path.exists() else 0
        message = f"loads {spec.path.name} with {spec.adaptor.name}"
        self._world.journal.note("starting", message, replica=self.id, argv=list(launch.argv))
        return await start_child(
            ChildSpec(
                argv=launch.argv,
                env=launch.env,
                log_path=self.log_path,
                control_socket=paths.keeper_socket(self.id),
                unlink=[socket],
            )
        )

    async def _until_answers(self) -> None:
        # Imported while the engine loads: an HTTP client costs a quarter of a second that nobody then waits for.
        from llamarack.supervise.engine_client import EngineClient

        assert self.endpoint is not None
        async with EngineClient(self.endpoint) as client:
            while not await client.is_up():  # noqa: ASYNC110 - the engine offers nothing to wait on
                await asyncio.sleep(_ANSWER_POLL_S)

    async def _card_free_bytes(self) -> Mapping[str, int | None]:
        """Of this replica's cards; empty on the processor."""
        if not self.spec.card_uuids:
            return {}
        free = await self._world.card_free_bytes()
        return {uuid: free[uuid] for uuid in self.spec.card_uuids if uuid in free}

    async def _warm_up(self, timeout_s: float) -> None:
        from llamarack.supervise.engine_client import EngineClient
        from llamarack.supervise.warmup import warm_up

        assert self.endpoint is not None
        longest = _LONG_PROMPT_TOKENS if self.spec.card_uuids else _LONG_PROMPT_CPU_TOKENS
        async with EngineClient(self.endpoint) as client:
            await warm_up(
                client,
                long_prompt_tokens=min(longest, self.spec.candidate.context_tokens // 2),
                timeout_s=timeout_s,
                has_template=self.spec.has_template,
            )

    async def _while_ready(self) -> None:
        """Returns only by raising: asked to stop, or died."""
        await self._unless_over(asyncio.Event().wait(), None)

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
                raise _Died(self.child.exit)
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
                    raise _Died(self.child.exit) from None
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
            waiting = asyncio.create_task(self._world.drained(self.id, self._world.drain_s))
            insisted = asyncio.create_task(self._asked_stop.wait())
            exited = asyncio.create_task(self.child.exited.wait()) if self.child else insisted
            await asyncio.wait({waiting, insisted, exited}, return_when=asyncio.FIRST_COMPLETED)
            for each in (waiting, insisted, exited):
                each.cancel()
        self._step(Event.STOP)
        await self._end_child()
        self._step(Event.GONE)
        self._world.journal.note("stopped", "stopped; no process is left", replica=self.id)

    async def _end_child(self) -> None:
        if self.child is None:
            return
        if self.child.exit is None:
            await self.child.stop(grace_s=GRACE_S)
        await self.child.release()
        self.child = None
        self.endpoint = None
        self.ready_since_unix_s = None

    async def _bury(self, error: Exception) -> None:
        """Records why it went down and makes sure that nothing of it is left."""
        tail = read_tail(self.log_path, self._log_from_bytes)
        diagnosis = self._diagnose(error, tail)
        self.last_death = Death(
            at_unix_s=time.time(),
            while_state=self.state,
            cause=diagnosis.cause,
            message=diagnosis.message,
            hint=diagnosis.hint,
            log_tail=tuple(tail[-20:]),
        )
        await self._end_child()
        self._deaths_monotonic_s.append(time.monotonic())
        was = self.state
        self._step(Event.DIED)
        self._world.journal.error(
            "died" if was is State.READY else "start_failed",
            f"{diagnosis.message} (while {was})",
            replica=self.id,
            cause=diagnosis.cause,
            hint=diagnosis.hint,
            log=str(self.log_path),
        )

    def _diagnose(self, error: Exception, tail: list[str]) -> Diagnosis:
        if isinstance(error, _Died):
            exit = error.exit
            if exit.oom_killed:
                return _host_out_of_memory("killed")
            if exit.signal is not None and exit.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
                return Diagnosis(cause="killed", message=f"{exit.words} from outside", hint=None)
            known = self.spec.adaptor.diagnose(exit.words, tail)
            if exit.oom_near and known.cause in {"unrecognised", "rank_died", "collective_failed"}:
                return _host_out_of_memory("a process of the engine was killed")
            return known
        if isinstance(error, NeverReady):  # an engine may answer with an error before it ends
            known = self.spec.adaptor.diagnose("not ready", tail)
            if known.cause != "unrecognised":
                return known
        hint = error.hint if isinstance(error, LlamarackError) else None
        cause = error.code if isinstance(error, LlamarackError) else "unrecognised"
        return Diagnosis(cause=cause, message=str(error) or type(error).__name__, hint=hint)

    async def _resume(self, degraded: Degraded | None) -> None:
        """An engine that is taken back goes on with the plan it was started with."""
        if degraded is not None:
            with contextlib.suppress(LlamarackError):  # only the numbers shown are then the file's
                self.spec = await self._world.plan_again(self.id, degraded.group, degraded.path)
            self.rungs = degraded.rungs

    async def _plan_smaller(self) -> bool:
        """After out of memory: the next rung that this machine has room for. True: the next start has it."""
        death = self.last_death
        assert death is not None
        if not self._is_short_of_memory(death.cause) or self.spec.model.on_out_of_memory == "fail":
            return False
        tried = smaller_plans(
            self.spec.group,
            self.spec.path,
            self.spec.candidate,
            taken=self.rungs,
            fallbacks=[
                path for path in self.spec.model.fallbacks if path.is_dir() == self.asked_spec.path.is_dir()
            ],  # of the format that this engine reads
            cause=death.cause,
        )
        for smaller in tried:
            words = smaller.rung.words
            try:
                spec = await self._world.plan_again(self.id, smaller.group, smaller.path)
            except (LlamarackError, OSError) as error:
                self._world.journal.warn("degrade_skipped", f"{words} is passed over: {error}", replica=self.id)
                continue
            self.spec, self.rungs = spec, (*self.rungs, smaller.rung)
            self.restarts += 1
            self._world.journal.warn(
                "degraded",
                f"out of memory: {words}; starts again with the smaller plan",
                replica=self.id,
                hint="the deployment file stays as it is; llamarack plan FILE shows what fits",
                setting=smaller.rung.setting,
                was=smaller.rung.was,
                becomes=smaller.rung.becomes,
                planned_bytes=sum(card.total_bytes for card in spec.candidate.cards),
            )
            self._step(Event.RETRY)
            return True
        return False

    def _is_short_of_memory(self, cause: str) -> bool:
        """Where the model lives in the host's memory, that is the memory a smaller plan saves."""
        return cause in OUT_OF_MEMORY or (cause == "host_out_of_memory" and not self.spec.card_uuids)

    def _why_given_up(self) -> str | None:
        """In words, where the next start would end the same way."""
        if self.last_death is None:
            return None
        cause = self.last_death.cause
        if cause == "host_out_of_memory" and self.spec.card_uuids:
            return None  # whoever took the RAM may give it back
        if self._is_short_of_memory(cause):
            if self.spec.model.on_out_of_memory == "fail":
                return "out of memory, and on_out_of_memory is fail"
            return "out of memory, and no smaller plan is left"
        return "the next start would end the same way" if cause in _HOPELESS else None

    async def _wait_for_retry(self) -> bool:
        """True: asked to stop meanwhile."""
        policy = self._world.restarts
        wait_s = policy.wait_s(self._deaths_monotonic_s, time.monotonic())
        hopeless = self._why_given_up()
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
        starting = asyncio.create_task(self._asked_start.wait())
        asked = asyncio.create_task(self._wait_asked())
        await asyncio.wait({starting, asked}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        was_asked = asked.done()
        starting.cancel()
        asked.cancel()
        if was_asked:
            self._step(Event.STOP)
            return True
        self._asked_start.clear()
        self.restarts += 1
        self._step(Event.START if self.state is State.FAILED else Event.RETRY)
        return False

    def _step(self, event: Event) -> None:
        self.state = next_state(self.state, event)
        self.changed.set()
        self.changed = asyncio.Event()
        self._world.changed()


def _host_out_of_memory(who: str) -> Diagnosis:
    return Diagnosis(
        cause="host_out_of_memory",
        message=f"{who} by the host's out-of-memory killer: {_memory_in_words()}",
        hint="give the host or the container more RAM, or lower limits.sequences; the card is not at fault",
    )


def _memory_in_words() -> str:
    """What ran out: the container's limit where it is the tighter one, else the RAM."""
    host, limit = read_host(), read_cgroup_limits().memory_bytes
    if limit is not None and limit <= host.memory_total_bytes:
        return f"the cgroup's limit of {format_bytes(limit)} is used up"
    return f"the RAM of {format_bytes(host.memory_total_bytes)} is used up"


def read_tail(path: Path, since_bytes: int = 0) -> list[str]:
    """The last lines of a log, undecodable bytes replaced; empty when there is none.

    `since_bytes`: where this start's part begins; a log that is shorter was turned over meanwhile and is read whole.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since_bytes if since_bytes <= size else 0, size - _LOG_TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
