"""Who may go on, who waits, who is turned away. One owner, one event loop; it never lets a request hang.

No more is sent to a replica than it has room for (`capacity`), so that waiting happens here, where it is bounded in
requests, tokens and time, fair between callers, and seen. With several workers a `Ledger` holds what the others gave
away, and every decision is taken under its lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from llamarack.engine.dialect import KvUse
from llamarack.errors import NotReady, Overloaded, RequestError
from llamarack.gateway import wire
from llamarack.gateway.capacity import NOTHING, Held, Pool, corrected, has_room
from llamarack.gateway.demand import Demand
from llamarack.gateway.fair_queue import FairQueue
from llamarack.gateway.ledger import Ledger, Part, total_held
from llamarack.gateway.routing import Policy, choose, of_this_turn, ready_replicas
from llamarack.supervise.table import ReplicaRow, Table

_EMPTY = Table(version=0, draining=False, models=(), replicas=())
_NO_DEMAND = Demand()
# A free slot is left this long to a worker whose waiter waits longer; then it goes to whoever looks.
_POLITE_S = 0.05
_ALONE: contextlib.nullcontext[None] = contextlib.nullcontext()


@dataclass(slots=True, eq=False)
class Reservation:
    """Room on one replica, until it is given back. `row`: the replica as it was then."""

    row: ReplicaRow
    model: str
    caller: str
    tokens: int
    slots: int = 1
    is_stuck: bool = False

    @property
    def id(self) -> str:
        return self.row.id


@dataclass(slots=True, eq=False)
class _Waiter:
    future: asyncio.Future[Reservation]
    excluded: Container[str]
    caller: str
    tokens: int
    slots: int
    session: bytes | None
    first: bool
    since_monotonic_s: float
    overtaken: int = 0


@dataclass(slots=True)
class _Line:
    """What waits for one model. `for_tokens`: its next has a slot but not the tokens."""

    queue: FairQueue[_Waiter] = field(default_factory=FairQueue)
    for_tokens: bool = False


class Admission:
    def __init__(
        self,
        *,
        max_queue_requests: int,
        max_queue_s: float,
        max_queue_tokens: int | None = None,
        policy: Policy = "least_loaded",
        ledger: Ledger | None = None,
    ) -> None:
        self.table = _EMPTY
        self.held: dict[str, Held] = {}
        self.stuck: dict[str, int] = {}
        self.pools: dict[str, Pool] = {}  # by endpoint key, so that an engine's next life starts anew
        self.part = Part()
        self._ready: dict[str, list[ReplicaRow]] = {}
        self.set_limits(
            max_queue_requests=max_queue_requests,
            max_queue_s=max_queue_s,
            max_queue_tokens=max_queue_tokens,
            policy=policy,
        )
        self._ledger = ledger
        self._others: list[tuple[int, Part]] = []
        self._lines: dict[str, _Line] = {}
        self._turn = 0
        self._chosen_at: dict[str, int] = {}
        self._looking: asyncio.TimerHandle | None = None

    # -- what is shown ------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests of this worker at each replica; those given up but not proven gone are among them."""
        return {replica: held.slots for replica, held in self.held.items()}

    @property
    def queued(self) -> dict[str, int]:
        return {model: len(line.queue) for model, line in self._lines.items() if len(line.queue)}

    def in_flight_of_all(self, replica: str) -> int:
        """Over all workers."""
        others = self._ledger.others() if self._ledger else []
        return total_held(replica, self.held.get(replica, NOTHING), others).slots

    def stuck_of_all(self, replica: str) -> int:
        others = self._ledger.others() if self._ledger else []
        return self.stuck.get(replica, 0) + sum(part.stuck.get(replica, 0) for _, part in others)

    def queued_of_all(self, model: str) -> int:
        others = self._ledger.others() if self._ledger else []
        return self.queued.get(model, 0) + sum(part.queued.get(model, 0) for _, part in others)

    # -- what changes it ----------------------------------------------------------------------------------------

    def set_limits(
        self,
        *,
        max_queue_requests: int,
        max_queue_s: float,
        max_queue_tokens: int | None = None,
        policy: Policy = "least_loaded",
    ) -> None:
        """For requests to come; who waits already waits as long as was promised."""
        self._max_queue_requests = max_queue_requests
        self._max_queue_s = max_queue_s
        self._max_queue_tokens = max_queue_tokens
        self._policy = policy

    def apply(self, table: Table) -> None:
        """A new table; what can go on now does."""
        self.table = table
        self._ready = {model.name: ready_replicas(table.replicas, model.name) for model in table.models}
        keys = {row.endpoint.key for row in table.replicas if row.endpoint is not None}
        self.pools = {key: pool for key, pool in self.pools.items() if key in keys}
        for row in table.replicas:
            if row.endpoint is not None and row.kv_tokens is not None and row.endpoint.key not in self.pools:
                self.pools[row.endpoint.key] = Pool(kv_tokens=row.kv_tokens)
        for model in list(self._lines):
            self._dispatch(model)

    def ready(self, model: str) -> list[ReplicaRow]:
        return self._ready.get(model, [])

    def see(self, row: ReplicaRow, use: KvUse, *, has_learned: bool = True) -> None:
        """What an engine shows of its KV cache moves how much is given away; up only where the guesses were learned."""
        if row.endpoint is None:
            return
        key = row.endpoint.key
        line = self._lines.get(row.model)
        pool = corrected(self.pools.get(key), use, turned_away=has_learned and bool(line and line.for_tokens))
        if pool is not None:
            self.pools[key] = pool
        self._dispatch(row.model)

    async def take(
        self,
        model: str,
        demand: Demand = _NO_DEMAND,
        *,
        excluded: Container[str] = (),
        again: bool = False,
        wait_s: float | None = None,
    ) -> Reservation:
        """A reservation on a replica, to be given back with `give` on every way out.

        `excluded`: keys of the endpoints that failed it; a replica started anew has another key.
        `again`: the request was admitted before and lost its replica; it waits for one to come back and goes to the
        front of the queue. Raises NotReady (none is ready, or draining) and Overloaded (queue full, waited too long).
        """
        if self.table.draining and not again:
            raise NotReady("this server is shutting down", retry_after_s=5)
        if not again and not self.ready(model):
            raise NotReady(f"the model `{model}` is not ready yet: {self._states(model)}", retry_after_s=5)
        line = self._line(model)
        waiter = _Waiter(
            future=asyncio.get_running_loop().create_future(),
            excluded=excluded,
            caller=demand.caller,
            tokens=demand.tokens,
            slots=demand.slots,
            session=demand.session,
            first=again,
            since_monotonic_s=time.monotonic(),
        )
        with self._deciding():
            if not len(line.queue):
                granted = self._choose_for(line, model, waiter)
                if granted is not None:
                    return granted
            line.queue.push(waiter)
            self._dispatch_locked(model, line, polite=True)
            if not waiter.future.done() and not again:
                self._bound(model, line, waiter)
        if waiter.future.done():
            return waiter.future.result()
        self._look_again_soon()
        return await self._wait(line, waiter, model, self._max_queue_s if wait_s is None else wait_s)

    def take_now(self, model: str, demand: Demand) -> Reservation | None:
        """What `take` gives to one that need not wait; None: it must, or is to be refused."""
        line = self._line(model)
        if line.queue or self.table.draining:
            return None
        wanted = Held(demand.slots, demand.tokens)
        if self._ledger is None:
            return self._choose(line, model, (), demand.caller, wanted, demand.session)
        with self._together(self._ledger):
            return self._choose(line, model, (), demand.caller, wanted, demand.session)

    def give(self, reservation: Reservation) -> None:
        """Returns one reservation, once."""
        if self._ledger is None:
            self._give(reservation)
            return
        with self._together(self._ledger):
            self._give(reservation)
            self._ring_those_who_wait(reservation.model)

    def mark_stuck(self, reservation: Reservation) -> None:
        """Given up, but the engine has not shown yet that the slot is free: it stays taken."""
        with self._deciding():
            reservation.is_stuck = True
            self._count_stuck(reservation, reservation.slots)

    def rung(self) -> None:
        """Another worker gave something back, or a free slot was left to one that did not take it."""
        for model, line in list(self._lines.items()):
            if len(line.queue):
                with self._deciding():
                    self._dispatch_locked(model, line, polite=False)

    # -- inside -------------------------------------------------------------------------------------------------

    def _line(self, model: str) -> _Line:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = _Line()
        return line

    def _give(self, reservation: Reservation) -> None:
        replica = reservation.row.id
        held = self.held[replica]
        slots = held.slots - reservation.slots
        if slots:
            self.held[replica] = Held(slots, held.tokens - reservation.tokens)
        else:
            del self.held[replica]
        if reservation.is_stuck:
            self._count_stuck(reservation, -reservation.slots)
        line = self._lines.get(reservation.model)
        if line is not None and line.queue:
            self._dispatch_locked(reservation.model, line, polite=True)

    def _deciding(self) -> contextlib.AbstractContextManager[None]:
        return _ALONE if self._ledger is None else self._together(self._ledger)

    @contextlib.contextmanager
    def _together(self, ledger: Ledger) -> Iterator[None]:
        """Under the ledger's lock, with the others' parts fresh before and this worker's own told after."""
        with ledger.locked():
            self._others = ledger.others()
            try:
                yield
            finally:
                self.part.held = self.held
                self.part.stuck = self.stuck
                self.part.queued = self.queued
                self.part.oldest = {
                    model: min(waiter.since_monotonic_s for waiter in line.queue)
                    for model, line in self._lines.items()
                    if len(line.queue)
                }
                ledger.publish(self.part)

    def _bound(self, model: str, line: _Line, newcomer: _Waiter) -> None:
        """Keeps the queue within its bounds: the newcomer goes, or who takes more than its share. Raises Overloaded."""
        waiting = len(line.queue) + sum(part.queued.get(model, 0) for _, part in self._others)
        before = line.queue.tokens - newcomer.tokens
        too_many = waiting > self._max_queue_requests
        if not too_many and (self._max_queue_tokens is None or before < self._max_queue_tokens):
            return
        bound = f"{waiting - 1} requests" if too_many else f"requests of {before} tokens"
        refusal = Overloaded(f"{bound} for `{model}` are waiting, the most that may", retry_after_s=self._wait_guess())
        out = line.queue.pushed_out(newcomer.caller)
        if out is None:
            line.queue.remove(newcomer)
            raise refusal
        line.queue.remove(out)
        if not out.future.done():
            out.future.set_exception(refusal)

    async def _wait(self, line: _Line, waiter: _Waiter, model: str, wait_s: float) -> Reservation:
        try:
            async with asyncio.timeout(wait_s):
                return await waiter.future
        except BaseException as error:
            with self._deciding():
                line.queue.remove(waiter)
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.give(waiter.future.result())  # granted in the very moment of giving up
            if isinstance(error, TimeoutError):
                raise Overloaded(wire.waited(wait_s), retry_after_s=self._wait_guess()) from None
            if isinstance(error, RequestError):
                raise error from None
            raise

    def _dispatch(self, model: str) -> None:
        line = self._lines.get(model)
        if line is not None and len(line.queue):
            with self._deciding():
                self._dispatch_locked(model, line, polite=False)

    def _dispatch_locked(self, model: str, line: _Line, *, polite: bool) -> None:
        while len(line.queue):
            if polite and self._another_waits_longer(model, line):
                return
            for waiter in line.queue.in_turn():
                if waiter.future.done():  # gave up this very moment
                    continue
                granted = self._choose_for(line, model, waiter)
                if granted is not None:
                    line.queue.grant(waiter)
                    waiter.future.set_result(granted)
                    break
            else:
                return

    def _another_waits_longer(self, model: str, line: _Line) -> bool:
        if not self._others:
            return False
        own = min(waiter.since_monotonic_s for waiter in line.queue)
        return any(part.oldest.get(model, own) < own for _, part in self._others)

    def _ring_those_who_wait(self, model: str) -> None:
        if self._ledger is not None:
            for worker, part in self._others:
                if part.queued.get(model):
                    self._ledger.ring(worker)

    def _look_again_soon(self) -> None:
        if self._ledger is not None and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_POLITE_S, self._look)

    def _look(self) -> None:
        self._looking = None
        self.rung()
        if self.queued:
            self._look_again_soon()

    def _choose_for(self, line: _Line, model: str, waiter: _Waiter) -> Reservation | None:
        wanted = Held(slots=waiter.slots, tokens=waiter.tokens)
        return self._choose(line, model, waiter.excluded, waiter.caller, wanted, waiter.session)

    def _choose(
        self, line: _Line, model: str, excluded: Container[str], caller: str, wanted: Held, session: bytes | None
    ) -> Reservation | None:
        free: list[ReplicaRow] = []
        homes: list[ReplicaRow] = []
        share: dict[str, float] = {}
        has_slot = False
        for row in self._ready.get(model, ()):
            assert row.endpoint is not None  # `ready_replicas` has none without
            if row.endpoint.key in excluded:
                continue
            homes.append(row)
            held = self.held.get(row.id, NOTHING)
            if self._others:
                held = total_held(row.id, held, self._others)
            share[row.id] = held.slots / row.slots
            if has_room(row, held, wanted, self.pools.get(row.endpoint.key)):
                free.append(row)
            has_slot = has_slot or held.slots + wanted.slots <= row.slots
        chosen: ReplicaRow | None
        if len(homes) == 1:  # the usual rack of one replica needs no choice
            chosen = free[0] if free else None
        else:
            chosen = choose(
                of_this_turn(free, homes, self._turn),
                lambda row: share[row.id],
                policy=self._policy,
                turn=self._turn,
                chosen_at=self._chosen_at,
                session=session,
                homes=homes,
            )
        # A slot that is kept for a replica on trial is no sign of a lack of tokens.
        line.for_tokens = chosen is None and has_slot and all(row.share is None for row in homes)
        if chosen is None:
            return None
        self._turn += 1
        self._chosen_at[chosen.id] = self._turn
        self.held[chosen.id] = self.held.get(chosen.id, NOTHING).plus(wanted)
        return Reservation(chosen, model, caller, wanted.tokens, wanted.slots)

    def _count_stuck(self, reservation: Reservation, change: int) -> None:
        count = self.stuck.get(reservation.id, 0) + change
        if count:
            self.stuck[reservation.id] = count
        else:
            self.stuck.pop(reservation.id, None)

    def _states(self, model: str) -> str:
        return ", ".join(f"{row.id} {row.state}" for row in self.table.replicas if row.model == model) or "no replica"

    def _wait_guess(self) -> float:
        return min(30.0, max(1.0, self._max_queue_s / 3))
