"""Carries out a change of a running rack: one step at a time, forward to the new layout or back to the old one.

One instance a change, run once. What comes next is decided in `rolling`, a trial is judged in `canary`; here is the
waiting, and the account of it for the journal and for `status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from llamarack.config import Deployment, plain
from llamarack.errors import HardwareError
from llamarack.supervise.canary import Trial
from llamarack.supervise.change_failure import Failure, asked_back
from llamarack.supervise.change_units import in_words, step_words, unit_of, units_of
from llamarack.supervise.journal import Journal
from llamarack.supervise.memory_file import SavedChange
from llamarack.supervise.replica import Replica
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.supervise.rolling import Await, Blocked, Start, Step, Stop, Unit, foreseen, next_step, ready_by_model
from llamarack.supervise.spec_json import spec_to_json
from llamarack.supervise.state import State
from llamarack.supervise.tally import Tally
from llamarack.supervise.trial_run import TrialRun, on_trial
from llamarack.units import format_duration

T = TypeVar("T")
_GONE = frozenset({State.STOPPED, State.FAILED})
_LEAVING = frozenset({State.DRAINING, State.STOPPING})
_DOWN = frozenset({State.BACKOFF, *_GONE})


class Outcome(StrEnum):
    RUNNING = "running"
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    INCOMPLETE = "incomplete"  # went back, but not everything of the old layout became ready again
    INTERRUPTED = "interrupted"  # the rack was stopped meanwhile


class Rack(Protocol):
    """What a change needs of the rack; the supervisor supplies it. `shares`: by replica on trial."""

    journal: Journal
    replicas: list[Replica]
    shares: dict[str, float]

    def add(self, spec: ReplicaSpec) -> Replica: ...

    async def retire(self, replica: Replica, *, patiently: bool) -> None:
        """Lets it finish what runs, ends it, forgets it. `patiently`: for as long as a request may take."""

    async def free_bytes(self) -> Mapping[int, int]: ...

    def tallies(self) -> Mapping[str, Tally]: ...

    def changed(self) -> None: ...

    def commit(self, change: Change) -> None:
        """The new layout is the rack's from now on."""


class Change:
    def __init__(
        self,
        rack: Rack,
        *,
        generation: int,
        deployment: Deployment,
        old: Sequence[ReplicaSpec],
        new: Sequence[ReplicaSpec],
        trial: Trial | None = None,
        going_back: str | None = None,
    ) -> None:
        self.generation = generation
        self.deployment = deployment
        self.old = {spec.id: spec for spec in old}
        self.new = {spec.id: spec for spec in new}
        self.trial = trial
        self.outcome = Outcome.RUNNING
        self.failure = Failure(going_back) if going_back else None
        self.done = asyncio.Event()
        self._rack = rack
        self._abort = asyncio.Event()
        self._free_known: Mapping[int, int] = {}
        self._started: set[str] = set()
        self._given_up: set[str] = set()  # brought back once, and down again
        self._ready_before: dict[str, int] = {}
        self._steps_done = 0
        self._steps_total = 0
        self._now = ""
        self._trial_run = TrialRun(rack, trial, {}) if trial else None
        self._begun_unix_s = time.time()
        self._ended_unix_s: float | None = None

    def ask_back(self) -> None:
        """Give it up and bring the old layout back."""
        self._abort.set()

    def foresee(self, free_bytes: Mapping[int, int]) -> tuple[tuple[Step, ...], Blocked | None]:
        return foreseen(self._running(), units_of(self.new), free_bytes, ready_by_model(self._running()))

    async def run(self) -> None:
        """Returns when the rack has the new layout or, after a failed step, the old one."""
        self._ready_before = ready_by_model(self._running())
        try:
            if self.failure is None:
                await self._forward()
                self._rack.commit(self)
                self._end(Outcome.DONE, f"done: generation {self.generation} serves", "change_done")
                return
        except Failure as failure:
            self.failure = failure
        except asyncio.CancelledError:
            self._end(Outcome.INTERRUPTED, "the rack stops in the middle of a change", "change_interrupted")
            raise
        await self._back(self.failure)

    async def _forward(self) -> None:
        steps, _ = self.foresee(await self._free_bytes())
        self._steps_total = len(steps)
        count = f"{len(steps)} step{'' if len(steps) == 1 else 's'}" if steps else "settings alone"
        self._note("change_started", f"changes to generation {self.generation}: {count}", steps=in_words(steps))
        for id in self.new:
            replica = self._find(id)
            if id not in self.old and replica is not None:  # an earlier supervisor began to load it
                await self._until_ready(replica, abortable=True)
                self._started.add(id)
        if self.trial is not None:
            await self._try_out(self.trial)
        while (step := await self._next(self.new)) is not None:
            self._require_started()
            if isinstance(step, Blocked):
                raise Failure(f"no room: {step.words}", hint="llamarack plan shows what fits", exit_code=4)
            await self._take(step, self.new)
        self._require_started()

    async def _back(self, failure: Failure | None) -> None:
        assert failure is not None
        self._rack.shares.clear()
        self._rack.journal.error(
            "change_failed",
            f"the change to generation {self.generation} goes back: {failure.message}",
            hint=failure.hint,
        )
        self._rack.changed()
        self._steps_total = self._steps_done + len(self._way_back(await self._free_bytes()))
        waits = True
        while (step := await self._next(self.old, waits=waits)) is not None:
            if isinstance(step, Blocked):  # it ran before: if it cannot now, its own restarts will tell
                step = Start(replica=step.replica)
            try:
                await self._take(step, self.old, abortable=False)
            except Failure as failed:
                self._rack.journal.error("change_failed", failed.message, hint=failed.hint)
                self._given_up.add(step.replica)
                waits = waits and not isinstance(step, Await)
        ready = {replica.id for replica in self._rack.replicas if replica.state is State.READY}
        lost = [id for id in self.old if id not in ready]
        if lost:
            text = f"went back, but not ready again: {', '.join(lost)}"
            self._end(Outcome.INCOMPLETE, text, "change_incomplete")
        else:
            self._end(Outcome.ROLLED_BACK, "went back: everything serves as before", "change_rolled_back")

    def _way_back(self, free_bytes: Mapping[int, int]) -> tuple[Step, ...]:
        return foreseen(self._running(), units_of(self.old), free_bytes, self._ready_before)[0]

    async def _next(self, target: Mapping[str, ReplicaSpec], *, waits: bool = True) -> Step | Blocked | None:
        free = await self._free_bytes()
        return next_step(self._running(), units_of(target), free, self._ready_before, waits=waits)

    async def _take(self, step: Step, target: Mapping[str, ReplicaSpec], *, abortable: bool = True) -> None:
        """Raises Failure when a start or a wait did not end in a ready replica."""
        words = {Start: "starts", Stop: "ends", Await: "waits for"}[type(step)]
        self._now = f"{words} {step.replica}"
        self._note(
            "change_step",
            f"step {self._steps_done + 1} of {max(self._steps_total, self._steps_done + 1)}: {step_words(step)}",
        )
        match step:
            case Start():
                await self._start(target[step.replica], abortable=abortable)
            case Await():
                await self._until_ready(self._known(step.replica), abortable=abortable)
            case Stop():
                await self._rack.retire(self._known(step.replica), patiently=step.makes_room_for is None)
        self._steps_done += 1
        self._now = ""

    async def _start(self, spec: ReplicaSpec, *, abortable: bool) -> None:
        dead = self._find(spec.id)
        if dead is not None:
            await self._rack.retire(dead, patiently=False)
        replica = self._rack.add(spec)
        await asyncio.sleep(0)  # its own task takes it out of `stopped` first
        going_forward = self.failure is None
        try:
            await self._until_ready(replica, abortable=abortable)
        except Failure:
            if going_forward:
                await self._rack.retire(replica, patiently=False)
            raise  # what is brought back goes on trying by itself
        self._started.add(spec.id)

    async def _until_ready(self, replica: Replica, *, abortable: bool) -> None:
        while replica.state is not State.READY:
            if replica.state in _DOWN:
                death = replica.last_death
                why = f": {death.message}" if death else ""
                hint = death.hint if death else None
                raise Failure(f"{replica.id} did not become ready{why}", hint=hint or f"read {replica.log_path}")
            moved = replica.changed.wait()
            await (self._unless_aborted(moved) if abortable else moved)

    def _require_started(self) -> None:
        """Raises Failure when a replica that this change has brought up is no longer ready, or somebody asked to go
        back."""
        if self._abort.is_set():
            raise asked_back()
        for id in self._started:
            replica = self._find(id)
            if replica is not None and replica.state is not State.READY:
                why = replica.last_death.message if replica.last_death else replica.state.value
                hint = replica.last_death.hint if replica.last_death else None
                raise Failure(f"{id} went down soon after it was ready: {why}", hint=hint)

    async def _try_out(self, trial: Trial) -> None:
        """One new replica of each changed model beside the old ones. Raises Failure unless all are judged good."""
        chosen = self.on_trial()
        for id in chosen:
            self._rack.shares[id] = trial.share
            if self._find(id) is None:
                both = {id: self.new[id], **self._running_specs()}
                step = next_step(self._running(), units_of(both), await self._free_bytes(), {})
                if not isinstance(step, Start):
                    words = step.words if isinstance(step, Blocked) else id
                    raise Failure(f"no room for a trial beside what runs: {words}", exit_code=4)
                await self._take(step, self.new)
        share = f"{trial.share * 100:g} % of the requests"
        self._note("trial_started", f"{', '.join(chosen)}: on trial with {share} for {format_duration(trial.for_s)}")
        self._now = f"tries {', '.join(chosen)} out"
        self._trial_run = TrialRun(self._rack, trial, {id: self.new[id].model.name for id in chosen})
        reasons = await self._trial_run.until_judged(lambda s: self._unless_aborted(asyncio.sleep(s)))
        self._note("trial_passed", f"the trial went well: {'; '.join(reasons)}")
        self._rack.shares.clear()
        self._rack.changed()

    def on_trial(self) -> list[str]:
        return on_trial(self.old, self.new)

    # -- what there is ------------------------------------------------------------------------------------------

    async def _free_bytes(self) -> Mapping[int, int]:
        """The way back must not end at a driver that does not answer: there the newest known counts. Raises Failure on
        the way forward."""
        try:
            self._free_known = await self._rack.free_bytes()
        except HardwareError as error:
            if self.failure is None:
                raise Failure(error.message, hint=error.hint, exit_code=error.exit_code) from error
        return self._free_known

    def _find(self, id: str) -> Replica | None:
        return next((replica for replica in self._rack.replicas if replica.id == id), None)

    def _known(self, id: str) -> Replica:
        replica = self._find(id)
        assert replica is not None
        return replica

    def _running(self) -> list[Unit]:
        alive = [each for each in self._rack.replicas if each.state not in _GONE or each.id in self._given_up]
        return [unit_of(replica.spec, is_ready=replica.state is State.READY) for replica in alive]

    def _running_specs(self) -> dict[str, ReplicaSpec]:
        return {replica.id: replica.spec for replica in self._rack.replicas if replica.state not in _GONE}

    async def _unless_aborted(self, work: Awaitable[T]) -> T:
        """Raises Failure when somebody asks to go back meanwhile."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._abort.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and not task.done():
                raise asked_back()
            return task.result()
        finally:
            for each in (task, asked):
                each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(task, asked, return_exceptions=True)

    # -- the account --------------------------------------------------------------------------------------------

    def _note(self, kind: str, message: str, **data: Any) -> None:
        self._rack.journal.note(kind, message, generation=self.generation, **data)
        self._rack.changed()

    @property
    def is_running(self) -> bool:
        return self.outcome is Outcome.RUNNING

    def _end(self, outcome: Outcome, message: str, kind: str) -> None:
        self.outcome = outcome
        self._now = ""
        self._ended_unix_s = time.time()
        write = self._rack.journal.error if outcome is Outcome.INCOMPLETE else self._rack.journal.note
        write(kind, message, generation=self.generation, seconds=self._ended_unix_s - self._begun_unix_s)
        self._rack.changed()
        self.done.set()

    def saved(self) -> SavedChange | None:
        """For the state file, while it runs."""
        if not self.is_running:
            return None
        return SavedChange(
            generation=self.generation,
            deployment=plain(self.deployment),
            old=[spec_to_json(spec) for spec in self.old.values()],
            trial=self.trial,
            going_back=self.failure.message if self.failure else None,
        )

    def record(self) -> dict[str, Any]:
        failure = self.failure
        return {
            "generation": self.generation,
            "outcome": self.outcome.value,
            "going_back": failure is not None,
            "steps_done": self._steps_done,
            "steps_total": max(self._steps_total, self._steps_done),
            "now": self._now or None,
            "started_unix_s": self._begun_unix_s,
            "ended_unix_s": self._ended_unix_s,
            "message": failure.message if failure else None,
            "hint": failure.hint if failure else None,
            "exit_code": failure.exit_code if failure else 0,
            "trial": self._trial_run.record() if self._trial_run else None,
        }


def is_leaving(state: State) -> bool:
    """Whether a replica is on its way out by somebody's order, or out already."""
    return state in _GONE or state in _LEAVING
