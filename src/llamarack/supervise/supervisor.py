"""The composition root of a rack: lays it out, starts gateway and replicas, keeps them, ends them in order.

One instance, one event loop; it owns the table, the state file and the lock of the rack. It carries no user traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarack.config import Deployment, Group
from llamarack.engine.builds import build_of, with_rpc_devices
from llamarack.errors import EngineError, UsageError
from llamarack.hardware.detect import detect_machine
from llamarack.model.read import read_model
from llamarack.paths import RackPaths, make_private
from llamarack.plan.devices import claim
from llamarack.supervise import memory_file
from llamarack.supervise.effective import deployment_sha256
from llamarack.supervise.gateways import GatewayPool
from llamarack.supervise.journal import Journal
from llamarack.supervise.keeping import KeptChild, attach_child
from llamarack.supervise.layout import plan_again
from llamarack.supervise.replica import Replica
from llamarack.supervise.replica_record import Remembered, ReplicaSpec
from llamarack.supervise.slot_watch import SlotWatch
from llamarack.supervise.state import RestartPolicy, State
from llamarack.supervise.table import ModelRow, ReplicaRow, Table

_STOP_TIMEOUT_S = 90.0
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


Planner = Callable[[Deployment, ReplicaSpec, Group, Path, Sequence[ReplicaSpec]], ReplicaSpec]


def plan_on_this_machine(
    deployment: Deployment, was: ReplicaSpec, group: Group, path: Path, waiting: Sequence[ReplicaSpec]
) -> ReplicaSpec:
    """`waiting`: replicas that do not run at the moment and will take their share again."""
    machine = with_rpc_devices(detect_machine(), [group])
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


class Supervisor:
    """`start()`, then `run()` until `ask_stop()`; `table()` and `replicas` are for reading."""

    def __init__(
        self,
        deployment: Deployment,
        specs: Sequence[ReplicaSpec],
        paths: RackPaths,
        *,
        planner: Planner | None = None,
    ) -> None:
        self.deployment = deployment
        self.paths = paths
        self._planner = planner or plan_on_this_machine
        self.journal = Journal(paths.events)
        self.restarts = RestartPolicy(
            max_restarts=deployment.supervise.restarts.max, window_s=deployment.supervise.restarts.window_s
        )
        self.drain_s = deployment.supervise.drain_s
        self.replicas = [Replica(spec, self) for spec in specs]
        self.gateways = GatewayPool(deployment.gateway, deployment.supervise.stuck_request_s, paths, self.journal)
        self.started_unix_s = time.time()
        self.links: list[dict[str, Any]] = []  # how cards reach each other, for `status`
        self.draining = False
        self._lock = RackLock(paths.lock)
        self._version = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._slot_watch: asyncio.Task[None] | None = None
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
        self.gateways.publish(self.table())
        self._remember()
        for callback in self.on_change:
            callback()

    async def drained(self, replica: str, timeout_s: float) -> bool:
        return await self.gateways.drained(replica, self._version, timeout_s)

    async def card_free_bytes(self) -> Mapping[str, int | None]:
        machine = await asyncio.to_thread(detect_machine)
        return {card.uuid: card.memory_free_bytes for card in machine.cards if card.uuid is not None}

    async def plan_again(self, replica: str, group: Group, path: Path) -> ReplicaSpec:
        """The replica with other limits or another file, as this machine has room for it now. Raises ConfigError,
        ModelError, HardwareError, DoesNotFit."""
        was = next(each for each in self.replicas if each.id == replica)
        waiting = [each.spec for each in self.replicas if each is not was and each.child is None]
        return await asyncio.to_thread(self._planner, self.deployment, was.asked_spec, group, path, waiting)

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
            adopted = await self._take_back(remembered)
            await self.gateways.open_port(remembered.gateways if remembered else [])
        except BaseException:
            self._lock.drop()
            raise
        self._version = int(time.time() * 1000)  # grows over restarts, so that gateways never see it go back
        self.changed()
        for replica in self.replicas:
            child, memory = adopted.get(replica.id, (None, None))
            self._tasks.append(asyncio.create_task(replica.run(child, memory), name=f"replica {replica.id}"))
        await self.gateways.start()
        least = self.deployment.supervise.slots_idle_min
        if least:
            self._slot_watch = asyncio.create_task(SlotWatch(least, self.journal, self._idle_slots).run())
        self.changed()

    async def run(self) -> None:
        """Until asked to stop; then drains, ends everything and returns when no process is left.

        Raises EngineError when no replica of any model ever became ready and none will.
        """
        stop = asyncio.create_task(self._asked_stop.wait())
        hopeless = asyncio.create_task(self._until_hopeless())
        try:
            while not stop.done() and not hopeless.done():
                running = [task for task in self._tasks if not task.done()]
                await asyncio.wait({stop, hopeless, *running}, return_when=asyncio.FIRST_COMPLETED)
                for task in self._tasks:
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
        """Waits until every replica is ready or will not be soon. True: all ready."""
        settled = {State.READY, State.FAILED, State.STOPPED}
        while True:
            if all(replica.state in settled for replica in self.replicas):
                return all(replica.state is State.READY for replica in self.replicas)
            await asyncio.wait(
                [asyncio.create_task(replica.changed.wait()) for replica in self.replicas],
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def drain_replica(self, name: str) -> bool:
        """Takes one replica out after its running requests; False when there is no such replica."""
        replica = next((replica for replica in self.replicas if replica.id == name), None)
        if replica is None:
            return False
        replica.ask_drain()
        return True

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
                for model in self.deployment.models
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
                )
                for replica in self.replicas
            ),
        )

    # -- inside -------------------------------------------------------------------------------------------------

    async def _take_back(
        self, remembered: memory_file.Memory | None
    ) -> dict[str, tuple[KeptChild | None, Remembered | None]]:
        """Attaches to engines that outlived their supervisor; ends those that the file no longer describes."""
        if remembered is None:
            return {}
        fingerprints = {replica.id: replica.spec.fingerprint for replica in self.replicas}
        adopted: dict[str, tuple[KeptChild | None, Remembered | None]] = {}
        for saved in remembered.replicas:
            child = await attach_child(saved.memory.control_socket)
            if child is None:
                continue
            known = fingerprints.get(saved.id) == saved.fingerprint
            if known and child.exit is None and child.start_ticks == saved.start_ticks:
                adopted[saved.id] = (child, saved.memory)
                continue
            if child.exit is None:
                self.journal.note("ended_leftover", "an engine that the file no longer describes", replica=saved.id)
                await child.stop()
            await child.release()
        return adopted

    def _remember(self) -> None:
        memory_file.write(
            self.paths.state,
            memory_file.Memory(
                supervisor_pid=os.getpid(),
                gateways=self.gateways.remembered(),
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
                    )
                    for replica in self.replicas
                    if replica.child is not None and replica.endpoint is not None
                ],
            ),
            self.journal,
        )

    async def _until_hopeless(self) -> None:
        """Returns once every replica has failed and none was ever ready: a start that did not work."""
        while True:
            never_ready = all(replica.start_seconds is None for replica in self.replicas)
            if never_ready and all(replica.state is State.FAILED for replica in self.replicas):
                return
            if not never_ready:
                await asyncio.Event().wait()
            await asyncio.wait(
                [asyncio.create_task(replica.changed.wait()) for replica in self.replicas],
                return_when=asyncio.FIRST_COMPLETED,
            )

    def _why_hopeless(self) -> EngineError:
        death = next((replica.last_death for replica in self.replicas if replica.last_death), None)
        first = self.replicas[0]
        if death is None:
            return EngineError("no replica became ready", hint=f"read {first.log_path}")
        tail = "\n".join(f"  | {line}" for line in death.log_tail)
        return EngineError(
            f"no replica became ready: {death.message}\nlast lines of {first.log_path}:\n{tail}", hint=death.hint
        )

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
        done, late = await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT_S) if self._tasks else (set(), set())
        for task in late:
            task.cancel()
        await asyncio.gather(*done, *late, return_exceptions=True)
        for leftover in (self.paths.state, self.paths.admin_socket):
            with contextlib.suppress(OSError):
                leftover.unlink()
        self.journal.note("rack_stopped", "stopped")
        self._lock.drop()
