"""The composition root of a rack: lays it out, starts gateway and replicas, keeps them, ends them in order.

One instance, one event loop; it owns the table, the state file and the lock of the rack. It carries no user traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarack.config import Deployment, Group, Model
from llamarack.engine.adaptor import Adaptor
from llamarack.errors import HardwareError, UsageError
from llamarack.hardware.detect import detect_machine
from llamarack.paths import RackPaths, make_private
from llamarack.plan.record import CPU_INDEX
from llamarack.supervise import memory_file
from llamarack.supervise.card_room import card_shortage
from llamarack.supervise.effective import deployment_sha256
from llamarack.supervise.gateways import GatewayPool
from llamarack.supervise.heir import saved_replicas, take_back
from llamarack.supervise.hopeless import why_hopeless
from llamarack.supervise.journal import Journal
from llamarack.supervise.keeping import KeptChild
from llamarack.supervise.own_memory import engine_memory
from llamarack.supervise.rack_lock import RackLock
from llamarack.supervise.rack_table import model_rows, replica_rows, served_models
from llamarack.supervise.replanning import Planner, plan_on_this_machine
from llamarack.supervise.replica import Replica
from llamarack.supervise.replica_files import drop_replaced
from llamarack.supervise.replica_record import Remembered, ReplicaSpec
from llamarack.supervise.slot_watch import SlotWatch, idle_slots
from llamarack.supervise.state import RestartPolicy, State
from llamarack.supervise.table import Table
from llamarack.supervise.tally import Tally

if TYPE_CHECKING:
    from llamarack.supervise.canary import Trial
    from llamarack.supervise.change import Change
    from llamarack.supervise.preparing import Prepared
    from llamarack.supervise.watch import Watch
    from llamarack.supervise.webhook import Webhook

_STOP_TIMEOUT_S = 90.0
_HEARD_TIMEOUT_S = 60.0  # a worker hears of a ready replica within milliseconds, once it has started
_CHANGE = "-"  # among the tasks; no replica is called so
_QUIET_S = 0.6  # longer than the gateways take to report that they are idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a rack was started from, for a command that reads it again: a deployment file or a model, and what the
    command line said instead of the file."""

    path: Path
    host: str | None = None
    port: int | None = None


class Supervisor:
    """`start()`, then `run()` until `ask_stop()`; `table()` and `replicas` are for reading."""

    def __init__(
        self,
        deployment: Deployment,
        specs: Sequence[ReplicaSpec],
        paths: RackPaths,
        *,
        planner: Planner | None = None,
        source: Source | None = None,
    ) -> None:
        self.deployment = deployment
        self.source = source
        self._asked_source = source  # of the change that runs: a failed one leaves `source`
        self.paths = paths
        self._planner = planner or plan_on_this_machine
        self.journal = Journal(paths.events)
        self.restarts = _restart_policy(deployment)
        self.drain_s = deployment.supervise.drain_s
        self.replicas: list[Replica] = []
        self.generation = 1
        self.change: Change | None = None  # the newest
        self.shares: dict[str, float] = {}
        self.gateways = GatewayPool(deployment.gateway, deployment.supervise.stuck_request_s, paths, self.journal)
        url = deployment.supervise.webhook
        self._webhook: Webhook | None = None
        if url is not None:
            from llamarack.supervise.webhook import Webhook

            self._webhook = Webhook(url, paths.name, self.journal)
            self.journal.on_entry.append(self._webhook.take)
        self._sending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.started_unix_s = time.time()
        self.links: list[dict[str, Any]] = []  # how cards reach each other, for `status`
        self.draining = False
        self._specs = list(specs)  # what the file asks for
        self._lock = RackLock(paths.lock)
        self._state_file = memory_file.StateFile(paths.state, self.journal)
        self._version = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by replica, and the change
        self._slot_watch: asyncio.Task[None] | None = None
        self._ever_ready = False
        self._moved = asyncio.Event()
        self._asked_stop = asyncio.Event()
        self._insisted = asyncio.Event()
        self.on_change: list[Callable[[], None]] = []  # called after every change of the table
        self._hashed: tuple[Deployment, str | None] | None = None

    @cached_property
    def watch(self) -> Watch:
        from llamarack.supervise.watch import Watch  # what it looks with is imported while the first engine loads

        return Watch(self)

    @property
    def deployment_sha256(self) -> str | None:
        """Of what runs, so that `status` can tell whether it was proved; None where a model file is gone."""
        if self._hashed is None or self._hashed[0] is not self.deployment:
            try:
                self._hashed = (self.deployment, deployment_sha256(self.deployment))
            except OSError:
                self._hashed = (self.deployment, None)
        return self._hashed[1]

    # -- what replicas need (replica.World) ---------------------------------------------------------------------

    def changed(self) -> None:
        """The table moved: tell the gateways and remember it."""
        self._version += 1
        self._ever_ready |= any(replica.state is State.READY for replica in self.replicas)
        self.gateways.publish(self.table())
        self._remember()
        self._moved.set()
        self._moved = asyncio.Event()
        for callback in self.on_change:
            callback()

    async def drained(self, replica: str, timeout_s: float) -> bool:
        return await self.gateways.drained(replica, self._version, timeout_s)

    async def card_free_bytes(self) -> Mapping[str, int | None]:
        machine = await asyncio.to_thread(detect_machine)
        return {card.uuid: card.memory_free_bytes for card in machine.cards if card.uuid is not None}

    async def card_shortage(self, spec: ReplicaSpec) -> str | None:
        try:
            machine = await asyncio.to_thread(detect_machine)
        except HardwareError:
            return None  # nobody knows; the engine will tell
        return card_shortage(spec.candidate.cards, machine.cards, self.watch.owners())

    async def plan_again(self, replica: str, group: Group, path: Path) -> ReplicaSpec:
        """The replica with other limits or another file, as this machine has room for it now. Raises ConfigError,
        ModelError, HardwareError, DoesNotFit."""
        was = next(each for each in self.replicas if each.id == replica)
        waiting = [each.spec for each in self.replicas if each is not was and each.child is None]
        own = engine_memory(was.child.control_socket) if was.child is not None else {}
        return await asyncio.to_thread(self._planner, self.deployment, was.asked_spec, group, path, waiting, own)

    # -- what a change needs (change.Rack) ----------------------------------------------------------------------

    def add(self, spec: ReplicaSpec) -> Replica:
        replica = Replica(spec, self)
        self.replicas.append(replica)
        self._run(replica)
        self.changed()
        return replica

    async def retire(self, replica: Replica, *, patiently: bool) -> None:
        longest_s = max(self.drain_s, self.deployment.gateway.request_timeout_s)
        replica.ask_drain(within_s=longest_s if patiently else None)
        task = self._tasks.get(replica.id)
        if task is not None:
            await asyncio.wait({task})
            del self._tasks[replica.id]
            task.result()  # a fault of ours
        self.replicas.remove(replica)
        self.changed()

    async def free_bytes(self) -> Mapping[int, int]:
        """By card index, -1 for the host."""
        machine = await asyncio.to_thread(detect_machine)
        cards = {card.index: card.memory_free_bytes for card in machine.cards}
        known = {index: free for index, free in cards.items() if free is not None}
        return {**known, CPU_INDEX: machine.host.memory_available_bytes}

    def tallies(self) -> Mapping[str, Tally]:
        return self.gateways.tallies()

    def commit(self, change: Change) -> None:
        self.deployment = change.deployment
        self.source = self._asked_source
        self.generation = change.generation
        self.restarts = _restart_policy(change.deployment)
        self.drain_s = change.deployment.supervise.drain_s
        self.gateways.apply(change.deployment.gateway)
        self._watch_slots()
        for replica in [each for each in self.replicas if each.id not in change.new]:
            replica.ask_stop()  # failed long before, and not part of the new layout
            self._tasks.pop(replica.id, None)
            self.replicas.remove(replica)
        order = list(change.new)
        self.replicas.sort(key=lambda replica: order.index(replica.id))
        for replica in self.replicas:
            replica.asked_spec = change.new[replica.id]
            if not replica.rungs:
                replica.spec = replica.asked_spec
        drop_replaced(self.paths, {*change.new, *change.old})

    def adaptors(self) -> Mapping[str, Adaptor]:
        from llamarack.engine import ADAPTORS  # here, since most commands only ask a rack

        return ADAPTORS

    async def prepare(self, deployment: Deployment) -> Prepared:
        """Raises what `preparing.prepare` raises; starts nothing."""
        from llamarack.supervise import preparing  # same

        return await preparing.prepare(deployment, self._memory(), [each.asked_spec for each in self.replicas])

    async def reload(
        self,
        deployment: Deployment,
        *,
        source: Source | None = None,
        restart: bool = False,
        trial: Trial | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Begins the change to another deployment, or tells (`dry_run`) what it would do.

        `restart`: replaces also replicas that are what the file asks for. Raises UsageError for what cannot change or
        while another change runs, DoesNotFit, and what `prepare` raises.
        """
        from llamarack.supervise.change_units import in_words  # most racks never change
        from llamarack.supervise.live_settings import require_changeable
        from llamarack.supervise.reloading import change_to, require_possible

        self._require_no_change()
        require_changeable(self.deployment, deployment, rack=self.paths.name)
        prepared = await self.prepare(deployment)
        free_bytes = await self.free_bytes()
        self._require_no_change()  # another command may have been faster
        change = change_to(self, deployment, prepared.specs, restart=restart, trial=trial)
        steps = require_possible(change, free_bytes)
        told = {
            "generation": change.generation,
            "steps": in_words(steps),
            "unchanged": not steps and deployment == self.deployment,
            "warnings": list(prepared.warnings),
        }
        if dry_run or told["unchanged"]:
            return told
        self._asked_source = source or self.source
        for warning in prepared.warnings:
            self.journal.warn("settings", warning)
        self._begin(change)
        return told

    def _require_no_change(self) -> None:
        if self._asked_stop.is_set():
            raise UsageError(f"rack `{self.paths.name}` is stopping", hint=f"llamarack status --rack {self.paths.name}")
        if self.change is not None and self.change.is_running:
            raise UsageError(
                f"rack `{self.paths.name}` is changing to generation {self.change.generation} already",
                hint=f"llamarack status --rack {self.paths.name} follows it; llamarack reload --abort brings it back",
            )

    def _begin(self, change: Change) -> None:
        self.change = change
        self._tasks[_CHANGE] = asyncio.create_task(change.run(), name="change")
        self.changed()

    def _run(self, replica: Replica, child: KeptChild | None = None, memory: Remembered | None = None) -> None:
        self._tasks[replica.id] = asyncio.create_task(replica.run(child, memory), name=f"replica {replica.id}")

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes the rack's lock, takes back what an earlier supervisor left, starts the rest.

        Raises UsageError when the rack runs already or its port is taken.
        """
        make_private(self.paths.folder)
        make_private(self.paths.sockets)
        make_private(self.paths.logs)
        self._lock.take(self.paths.name)
        try:
            remembered = memory_file.read(self.paths.state)
            heritage = await take_back(remembered, self._specs, self.deployment, self.adaptors, self.journal)
            self.generation = heritage.generation
            self.replicas = [Replica(spec, self) for spec in heritage.specs]
            await self.gateways.open_port(remembered.gateways if remembered else [])
        except BaseException:
            self._lock.drop()
            raise
        self._version = int(time.time() * 1000)  # grows over restarts, so that gateways never see it go back
        self.changed()
        for replica in self.replicas:
            child, memory = heritage.adopted.get(replica.id, (None, None))
            self._run(replica, child, memory)
        if (unfinished := heritage.unfinished) is not None:
            for replica in self.replicas:  # its first look is at what was taken back
                while replica.state is State.STOPPED and not self._tasks[replica.id].done():
                    await replica.changed.wait()
            from llamarack.supervise.change import Change

            self._begin(
                Change(
                    self,
                    generation=unfinished.generation,
                    deployment=self.deployment,
                    old=unfinished.old,
                    new=unfinished.new,
                    trial=unfinished.trial,
                    going_back=unfinished.going_back,
                )
            )
        await self.gateways.start()
        self._watch_slots()
        self._watching = asyncio.create_task(self.watch.run(), name="watch")
        if self._webhook is not None:
            self._sending = asyncio.create_task(self._webhook.run(), name="webhook")
        self.changed()

    async def run(self) -> None:
        """Until asked to stop; then drains, ends everything and returns when no process is left.

        Raises EngineError when no replica of any model ever became ready and none will.
        """
        stop = asyncio.create_task(self._asked_stop.wait())
        hopeless = asyncio.create_task(self._until_hopeless())
        try:
            while not stop.done() and not hopeless.done():
                running = [task for task in self._tasks.values() if not task.done()]
                watching = {self._watching} if self._watching is not None else set()
                moved = asyncio.create_task(self._moved.wait())  # a change brings new tasks
                await asyncio.wait({stop, hopeless, moved, *running, *watching}, return_when=asyncio.FIRST_COMPLETED)
                moved.cancel()
                for task in (*self._tasks.values(), *watching):
                    if task.done() and not task.cancelled():
                        task.result()  # a fault of ours ends the rack
        finally:
            failed = hopeless.done() and not hopeless.cancelled()
            stop.cancel()
            hopeless.cancel()
            await self._shut_down()
        if failed:
            raise why_hopeless(self.replicas, self.paths.events)

    def ask_stop(self) -> None:
        """First call: drain and stop. Second call: stop without draining."""
        if self._asked_stop.is_set():
            self._insisted.set()
        self._asked_stop.set()

    async def until_settled(self) -> bool:
        """Waits until every replica is ready or will not be soon, and requests are let in to those that are. True: all
        ready."""
        settled = {State.READY, State.FAILED, State.STOPPED}
        while self._changing() or not all(replica.state in settled for replica in self.replicas):
            await self._moved.wait()
        if not any(replica.state is State.READY for replica in self.replicas):
            return False  # at once, since without any the rack ends
        if not await self.gateways.acted_on(self._version, _HEARD_TIMEOUT_S):
            self.journal.error("gateway_silent", f"a gateway worker says nothing for {_HEARD_TIMEOUT_S:g} s")
            return False
        return all(replica.state is State.READY for replica in self.replicas)

    async def drain_replica(self, name: str) -> bool:
        """Takes one replica out after its running requests; False when there is no such replica."""
        replica = next((replica for replica in self.replicas if replica.id == name), None)
        if replica is None:
            return False
        replica.ask_drain()
        return True

    @property
    def models(self) -> list[Model]:
        """What clients can ask for."""
        return served_models(self.deployment, self.replicas)

    def table(self) -> Table:
        return Table(
            version=self._version,
            draining=self.draining,
            models=model_rows(self.models, created_unix_s=int(self.started_unix_s)),
            replicas=replica_rows(self.replicas, self.shares),
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _changing(self) -> bool:
        return self.change is not None and self.change.is_running

    def _remember(self) -> None:
        self._state_file.write(self._memory())

    def _memory(self) -> memory_file.Memory:
        return memory_file.Memory(
            supervisor_pid=os.getpid(),
            gateways=self.gateways.remembered(),
            generation=self.generation,
            change=self.change.saved() if self.change is not None else None,
            replicas=saved_replicas(self.replicas),
        )

    async def _until_hopeless(self) -> None:
        """Returns once every replica has failed and none was ever ready: a start that did not work."""
        while (
            self._ever_ready or self._changing() or not all(replica.state is State.FAILED for replica in self.replicas)
        ):
            await self._moved.wait()

    def _watch_slots(self) -> None:
        if self._slot_watch is not None:
            self._slot_watch.cancel()
            self._slot_watch = None
        least = self.deployment.supervise.slots_idle_min
        if least:
            watch = SlotWatch(least, self.journal, lambda: idle_slots(self.replicas, self.gateways.in_flight))
            self._slot_watch = asyncio.create_task(watch.run())

    async def _shut_down(self) -> None:
        if (change := self._tasks.pop(_CHANGE, None)) is not None:
            change.cancel()
            await asyncio.gather(change, return_exceptions=True)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._slot_watch is not None:
            self._slot_watch.cancel()
        self.draining = True
        self.changed()
        if not await self.gateways.drained(None, self._version, min(_QUIET_S, self.drain_s)):
            running = self.gateways.in_flight_total()
            self.journal.note("draining", f"requests running: {running}; waits up to {self.drain_s:g} s for them")
        insisted = asyncio.create_task(self._insisted.wait())
        quiet = asyncio.create_task(self.gateways.drained(None, self._version, self.drain_s))
        await asyncio.wait({insisted, quiet}, return_when=asyncio.FIRST_COMPLETED)
        for each in (insisted, quiet):
            each.cancel()
        for replica in self.replicas:
            replica.ask_stop()
        await self.gateways.stop()
        tasks = self._tasks.values()
        done, late = await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S) if tasks else (set(), set())
        for task in late:
            task.cancel()
        await asyncio.gather(*done, *late, return_exceptions=True)
        for leftover in (self.paths.state, self.paths.admin_socket):
            with contextlib.suppress(OSError):
                leftover.unlink()
        self.journal.note("rack_stopped", "stopped")
        if self._webhook is not None and self._sending is not None:
            await self._webhook.finish()
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        self._lock.drop()


def _restart_policy(deployment: Deployment) -> RestartPolicy:
    restarts = deployment.supervise.restarts
    return RestartPolicy(max_restarts=restarts.max, window_s=restarts.window_s)
