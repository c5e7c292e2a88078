"""The composition root of a rack: lays it out, starts gateway and replicas, keeps them, ends them in order.

One instance, one event loop; it owns the table, the state file and the lock of the rack. It carries no user traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarack.config import Deployment, Group, Model
from llamarack.engine.adaptor import Adaptor
from llamarack.engine.builds import build_of, with_rpc_devices
from llamarack.errors import DoesNotFit, EngineError, HardwareError, UsageError
from llamarack.hardware.detect import detect_machine
from llamarack.model.read import read_model
from llamarack.paths import RackPaths, make_private
from llamarack.plan.devices import claim
from llamarack.plan.record import CPU_INDEX
from llamarack.supervise import generation, memory_file
from llamarack.supervise.canary import Trial
from llamarack.supervise.card_room import card_shortage
from llamarack.supervise.change import Change, Outcome, in_words, is_leaving
from llamarack.supervise.effective import deployment_sha256
from llamarack.supervise.gateways import GatewayPool
from llamarack.supervise.journal import Journal
from llamarack.supervise.keeping import KeptChild, attach_child
from llamarack.supervise.layout import plan_again
from llamarack.supervise.live_settings import require_changeable
from llamarack.supervise.own_memory import engine_memory, without_engines
from llamarack.supervise.replica import Replica
from llamarack.supervise.replica_record import Remembered, ReplicaSpec
from llamarack.supervise.slot_watch import SlotWatch
from llamarack.supervise.spec_json import deployment_from_json, spec_from_json, spec_to_json
from llamarack.supervise.state import RestartPolicy, State
from llamarack.supervise.table import ModelRow, ReplicaRow, Table
from llamarack.supervise.tally import Tally
from llamarack.supervise.watch import Watch
from llamarack.supervise.webhook import Webhook

if TYPE_CHECKING:
    from llamarack.supervise.preparing import Prepared

_STOP_TIMEOUT_S = 90.0
_HEARD_TIMEOUT_S = 60.0  # a worker hears of a ready replica within milliseconds, once it has started
_CHANGE = "-"  # among the tasks; no replica is called so
_REPLICA_FILE = re.compile(r"(.+-\d+(?:-g\d+)?)(?:\.log(?:\.\d)?)?")
_QUIET_S = 0.6  # longer than the gateways take to report that they are idle


class RackLock:
    """One supervisor a rack. The kernel drops it with its holder, so a killed supervisor blocks nobody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def take(self, rack: str) -> None:
        """Raises UsageError when another supervisor holds it."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.read(fd, 32).decode().strip() or "unknown"
            os.close(fd)
            raise UsageError(
                f"rack `{rack}` is already running (process {pid})",
                hint=f"llamarack status --rack {rack}; llamarack stop --rack {rack}; or another name with --rack",
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        self._fd = fd

    def drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_running(paths: RackPaths) -> bool:
    """Whether a supervisor holds the rack's lock."""
    try:
        fd = os.open(paths.lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def lock_holder(paths: RackPaths) -> int | None:
    """The process that holds, or held last, the rack's lock."""
    try:
        return int(paths.lock.read_text())
    except (OSError, ValueError):
        return None


Planner = Callable[[Deployment, ReplicaSpec, Group, Path, Sequence[ReplicaSpec], Mapping[int, int]], ReplicaSpec]


def plan_on_this_machine(
    deployment: Deployment,
    was: ReplicaSpec,
    group: Group,
    path: Path,
    waiting: Sequence[ReplicaSpec],
    own: Mapping[int, int],
) -> ReplicaSpec:
    """`waiting`: replicas that do not run at the moment and will take their share again. `own`: memory by pid of the
    engine that is planned anew, where it runs already."""
    machine = without_engines(with_rpc_devices(detect_machine(), [group]), own)
    claimed: dict[int, int] = {}
    for each in waiting:
        claim(claimed, each.candidate.cards, each.candidate.host_bytes)
    return plan_again(
        was,
        group,
        path,
        machine,
        read_model(path),
        deployment.supervise,
        build=build_of(group, machine),
        claimed_bytes=claimed,
        is_kv_shared=sum(len(model.groups) for model in deployment.models) > 1,
    )


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
        self._webhook = None if url is None else Webhook(url, paths.name, self.journal)
        if self._webhook is not None:
            self.journal.on_entry.append(self._webhook.take)
        self._sending: asyncio.Task[None] | None = None
        self.watch = Watch(self)
        self._watching: asyncio.Task[None] | None = None
        self.started_unix_s = time.time()
        self.links: list[dict[str, Any]] = []  # how cards reach each other, for `status`
        self.draining = False
        self._specs = list(specs)  # what the file asks for
        self._lock = RackLock(paths.lock)
        self._version = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by replica, and the change
        self._slot_watch: asyncio.Task[None] | None = None
        self._ever_ready = False
        self._moved = asyncio.Event()
        self._asked_stop = asyncio.Event()
        self._insisted = asyncio.Event()
        self.on_change: list[Callable[[], None]] = []  # called after every change of the table
        self._hashed: tuple[Deployment, str | None] | None = None

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
        self._drop_files({*change.new, *change.old})

    def _drop_files(self, kept: Collection[str]) -> None:
        """Logs and settings of replicas that were replaced before the newest change; those of it stay to be read."""
        for path in [*self.paths.logs.glob("*.log*"), *(self.paths.folder / "replicas").glob("*")]:
            found = _REPLICA_FILE.fullmatch(path.name)
            if found is None or found[1] in kept or found[1].startswith("gateway-"):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

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
        self._require_no_change()
        require_changeable(self.deployment, deployment, rack=self.paths.name)
        prepared = await self.prepare(deployment)
        self._require_no_change()  # another command may have been faster
        present = [
            generation.Present(
                id=replica.id,
                fingerprint="" if restart else replica.spec.fingerprint,
                is_ready=replica.state is State.READY,
            )
            for replica in self.replicas
            if not is_leaving(replica.state)
        ]
        old = [replica.spec for replica in self.replicas if not is_leaving(replica.state)]
        number = self.generation + 1
        new = generation.matched(present, prepared.specs, number)
        change = Change(self, generation=number, deployment=deployment, old=old, new=new, trial=trial)
        steps, blocked = change.foresee(await self.free_bytes())
        if blocked is not None:
            raise DoesNotFit(f"no room: {blocked.words}", hint="llamarack plan shows what fits")
        if trial is not None and not change.on_trial():
            raise UsageError(
                "there is nothing to try out: the file changes no replica of a model that runs",
                hint="llamarack reload without --canary; --restart replaces unchanged replicas too",
            )
        told = {
            "generation": number,
            "steps": in_words(steps),
            "unchanged": not steps and deployment == self.deployment,
            "warnings": list(prepared.warnings),
        }
        if dry_run or told["unchanged"]:
            return told
        if source is not None:
            self.source = source
        for warning in prepared.warnings:
            self.journal.warn("settings", warning)
        self._begin(change)
        return told

    def _require_no_change(self) -> None:
        if self._asked_stop.is_set():
            raise UsageError(f"rack `{self.paths.name}` is stopping", hint=f"llamarack status --rack {self.paths.name}")
        if self.change is not None and self.change.outcome is Outcome.RUNNING:
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
            adopted, resumed = await self._take_back(remembered)
            await self.gateways.open_port(remembered.gateways if remembered else [])
        except BaseException:
            self._lock.drop()
            raise
        self._version = int(time.time() * 1000)  # grows over restarts, so that gateways never see it go back
        self.changed()
        for replica in self.replicas:
            child, memory = adopted.get(replica.id, (None, None))
            self._run(replica, child, memory)
        if resumed is not None:
            for replica in self.replicas:  # its first look is at what was taken back
                while replica.state is State.STOPPED and not self._tasks[replica.id].done():
                    await replica.changed.wait()
            self._begin(resumed)
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
            raise self._why_hopeless()

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
        """What clients can ask for: the file's, and in a change what comes or goes for as long as it is ready."""
        served = {model.name: model for model in self.deployment.models}
        for replica in self.replicas:
            if replica.state is State.READY:
                served.setdefault(replica.spec.model.name, replica.spec.model)
        return list(served.values())

    def table(self) -> Table:
        return Table(
            version=self._version,
            draining=self.draining,
            models=tuple(
                ModelRow(
                    name=model.name,
                    created_unix_s=int(self.started_unix_s),
                    defaults=model.defaults,
                    max_output_tokens=model.max_output_tokens,
                )
                for model in self.models
            ),
            replicas=tuple(
                ReplicaRow(
                    id=replica.id,
                    model=replica.spec.model.name,
                    engine=replica.spec.group.engine,
                    state=replica.state,
                    endpoint=replica.endpoint,
                    slots=replica.spec.candidate.sequences,
                    context_tokens=replica.spec.candidate.context_tokens,
                    kv_tokens=replica.spec.candidate.context_tokens if replica.spec.candidate.kv_unified else None,
                    share=self.shares.get(replica.id),
                )
                for replica in self.replicas
            ),
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _changing(self) -> bool:
        return self.change is not None and self.change.outcome is Outcome.RUNNING

    async def _take_back(
        self, remembered: memory_file.Memory | None
    ) -> tuple[dict[str, tuple[KeptChild, Remembered]], Change | None]:
        """Attaches to engines that outlived their supervisor and fills `replicas`.

        What the file no longer describes serves on until a change has replaced it: that change comes back too, also
        one in whose middle the supervisor died.
        """
        if remembered is None:
            self.replicas = [Replica(spec, self) for spec in self._specs]
            return {}, None
        self.generation = remembered.generation
        attached = [each for saved in remembered.replicas if (each := await self._attach(saved)) is not None]
        number = self.generation + 1
        present = [generation.Present(id=saved.id, fingerprint=saved.fingerprint) for saved, _ in attached]
        wanted = generation.matched(present, self._specs, number)
        by_id = {spec.id: spec for spec in wanted}
        adopted: dict[str, tuple[KeptChild, Remembered]] = {}
        left_over: dict[str, ReplicaSpec] = {}
        for saved, child in attached:
            if saved.id not in by_id:
                spec = spec_from_json(saved.spec, self.adaptors()) if saved.memory.was_ready else None
                if spec is None:
                    self.journal.note("ended_leftover", "an engine that the file no longer describes", replica=saved.id)
                    await child.stop()
                    await child.release()
                    continue
                left_over[saved.id] = spec
            adopted[saved.id] = (child, saved.memory)
        broken_off = remembered.change
        if not left_over and broken_off is None:
            self.replicas = [Replica(spec, self) for spec in wanted]
            return adopted, None
        here = {**left_over, **{id: spec for id, spec in by_id.items() if id in adopted}}
        self.replicas = [Replica(spec, self) for spec in here.values()]
        return adopted, self._resumed(broken_off, number, here, wanted)

    async def _attach(self, saved: memory_file.SavedReplica) -> tuple[memory_file.SavedReplica, KeptChild] | None:
        child = await attach_child(saved.memory.control_socket)
        if child is None:
            return None
        if child.exit is None and child.start_ticks == saved.start_ticks:
            return saved, child
        if child.exit is None:
            await child.stop()
        await child.release()
        return None

    def _resumed(
        self,
        broken_off: memory_file.SavedChange | None,
        number: int,
        here: Mapping[str, ReplicaSpec],
        wanted: Sequence[ReplicaSpec],
    ) -> Change:
        """The change from what is still there to what the file asks for now. `here`: what runs, by id.

        One that was going back goes back; one on trial is tried anew, if the file still asks for the same.
        """
        if broken_off is None:
            self.journal.note(
                "change_resumed", "engines run that the file no longer describes: they serve until replaced"
            )
            return Change(self, generation=number, deployment=self.deployment, old=list(here.values()), new=wanted)
        saved = [spec_from_json(value, self.adaptors()) for value in broken_off.old]
        old = [spec for spec in saved if spec is not None]
        is_same = deployment_from_json(broken_off.deployment) == self.deployment
        self.journal.note(
            "change_resumed",
            f"the change to generation {broken_off.generation} was broken off in its middle; it goes on",
        )
        return Change(
            self,
            generation=number,
            deployment=self.deployment,
            old=old,
            new=wanted,
            trial=broken_off.trial if is_same and any(spec.id in here for spec in old) else None,
            going_back=broken_off.going_back if is_same else None,
        )

    def _remember(self) -> None:
        memory_file.write(self.paths.state, self._memory(), self.journal)

    def _memory(self) -> memory_file.Memory:
        return memory_file.Memory(
            supervisor_pid=os.getpid(),
            gateways=self.gateways.remembered(),
            generation=self.generation,
            change=self.change.saved() if self.change is not None else None,
            replicas=[
                memory_file.SavedReplica(
                    id=replica.id,
                    fingerprint=replica.spec.fingerprint,
                    start_ticks=replica.child.start_ticks,
                    memory=Remembered(
                        endpoint=replica.endpoint,
                        control_socket=replica.child.control_socket,
                        was_ready=replica.state is State.READY,
                        restarts=replica.restarts,
                        last_death=replica.last_death,
                        degraded=replica.degraded,
                    ),
                    spec=spec_to_json(replica.asked_spec),
                )
                for replica in self.replicas
                if replica.child is not None and replica.endpoint is not None
            ],
        )

    async def _until_hopeless(self) -> None:
        """Returns once every replica has failed and none was ever ready: a start that did not work."""
        while (
            self._ever_ready or self._changing() or not all(replica.state is State.FAILED for replica in self.replicas)
        ):
            await self._moved.wait()

    def _why_hopeless(self) -> EngineError:
        death = next((replica.last_death for replica in self.replicas if replica.last_death), None)
        if not self.replicas:
            return EngineError("nothing is left that could serve", hint=f"read {self.paths.events}")
        first = self.replicas[0]
        if death is None:
            return EngineError("no replica became ready", hint=f"read {first.log_path}")
        tail = "\n".join(f"  | {line}" for line in death.log_tail)
        return EngineError(
            f"no replica became ready: {death.message}\nlast lines of {first.log_path}:\n{tail}", hint=death.hint
        )

    def _watch_slots(self) -> None:
        if self._slot_watch is not None:
            self._slot_watch.cancel()
            self._slot_watch = None
        least = self.deployment.supervise.slots_idle_min
        if least:
            self._slot_watch = asyncio.create_task(SlotWatch(least, self.journal, self._idle_slots).run())

    def _idle_slots(self) -> dict[str, int]:
        """By model, of its ready replicas; a model without one has other events."""
        idle: dict[str, int] = {}
        for replica in self.replicas:
            if replica.state is State.READY:
                taken = sum(counts.in_flight.get(replica.id, 0) for counts in self.gateways.counts.values())
                free = max(0, replica.spec.candidate.sequences - taken)
                idle[replica.spec.model.name] = idle.get(replica.spec.model.name, 0) + free
        return idle

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
