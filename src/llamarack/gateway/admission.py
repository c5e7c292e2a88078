"""Who may go on, who waits, who is turned away. One owner, one event loop; it never lets a request hang.

A llama.cpp slot is the reservation: no more requests are sent to a replica than it has slots, so that waiting happens
here, where it is bounded, fair and seen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from llamarack.errors import NotReady, Overloaded
from llamarack.gateway import wire
from llamarack.gateway.routing import choose, ready_replicas
from llamarack.supervise.table import ReplicaRow, Table

_EMPTY = Table(version=0, draining=False, models=(), replicas=())


@dataclass(slots=True, eq=False)
class _Waiter:
    future: asyncio.Future[ReplicaRow]
    excluded: Container[str]


class Admission:
    def __init__(self, *, max_queue_requests: int, max_queue_s: float) -> None:
        self.table = _EMPTY
        self.in_flight: dict[str, int] = {}
        self.set_limits(max_queue_requests=max_queue_requests, max_queue_s=max_queue_s)
        self._queues: dict[str, deque[_Waiter]] = {}
        self._turn = 0

    def set_limits(self, *, max_queue_requests: int, max_queue_s: float) -> None:
        """For requests to come; who waits already waits as long as was promised."""
        self._max_queue_requests = max_queue_requests
        self._max_queue_s = max_queue_s

    @property
    def queued(self) -> dict[str, int]:
        return {model: len(queue) for model, queue in self._queues.items() if queue}

    def apply(self, table: Table) -> None:
        """A new table; what can go on now does."""
        self.table = table
        for model in list(self._queues):
            self._dispatch(model)

    async def take(
        self, model: str, *, excluded: Container[str] = (), again: bool = False, wait_s: float | None = None
    ) -> ReplicaRow:
        """A reservation on a replica, to be given back with `give` on every way out.

        `excluded`: keys of the endpoints that failed it; a replica started anew has another key.
        `again`: the request was admitted before and lost its replica; it waits for one to come back and goes to the
        front of the queue. Raises NotReady (none is ready, or draining) and Overloaded (queue full, waited too long).
        """
        if self.table.draining and not again:
            raise NotReady("this server is shutting down", retry_after_s=5)
        queue = self._queues.setdefault(model, deque())
        ready = ready_replicas(self.table.replicas, model)
        if not ready and not again:
            raise NotReady(f"the model `{model}` is not ready yet: {self._states(model)}", retry_after_s=5)
        # Overtakes nobody: what is free now, everyone who waits was offered and excludes.
        chosen = self._choose(ready, excluded)
        if chosen is not None:
            return self._reserve(chosen)
        if len(queue) >= self._max_queue_requests and not again:
            raise Overloaded(
                f"{len(queue)} requests for `{model}` are waiting, the most that may", retry_after_s=self._wait_guess()
            )
        waiter = _Waiter(asyncio.get_running_loop().create_future(), excluded)
        if again:
            queue.appendleft(waiter)
        else:
            queue.append(waiter)
        return await self._wait(queue, waiter, model, wait_s or self._max_queue_s)

    def give(self, replica: str, model: str) -> None:
        """Returns one reservation."""
        left = self.in_flight[replica] - 1
        if left:
            self.in_flight[replica] = left
        else:
            del self.in_flight[replica]
        self._dispatch(model)

    async def _wait(self, queue: deque[_Waiter], waiter: _Waiter, model: str, wait_s: float) -> ReplicaRow:
        try:
            async with asyncio.timeout(wait_s):
                return await waiter.future
        except BaseException as error:
            if waiter in queue:
                queue.remove(waiter)
            if waiter.future.done() and not waiter.future.cancelled():
                self.give(waiter.future.result().id, model)  # granted in the very moment of giving up
            if isinstance(error, TimeoutError):
                raise Overloaded(wire.waited(wait_s), retry_after_s=self._wait_guess()) from None
            raise

    def _dispatch(self, model: str) -> None:
        queue = self._queues.get(model)
        while queue:
            ready = ready_replicas(self.table.replicas, model)
            waiter = next((each for each in queue if self._choose(ready, each.excluded) is not None), None)
            if waiter is None:
                return
            chosen = self._choose(ready, waiter.excluded)
            assert chosen is not None
            queue.remove(waiter)
            if not waiter.future.done():
                waiter.future.set_result(self._reserve(chosen))

    def _choose(self, ready: list[ReplicaRow], excluded: Container[str]) -> ReplicaRow | None:
        return choose(ready, self.in_flight, excluded=excluded, turn=self._turn)

    def _reserve(self, replica: ReplicaRow) -> ReplicaRow:
        self.in_flight[replica.id] = self.in_flight.get(replica.id, 0) + 1
        self._turn += 1
        return replica

    def _states(self, model: str) -> str:
        return ", ".join(f"{row.id} {row.state}" for row in self.table.replicas if row.model == model) or "no replica"

    def _wait_guess(self) -> float:
        return min(30.0, max(1.0, self._max_queue_s / 3))
