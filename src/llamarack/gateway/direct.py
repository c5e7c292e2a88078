"""A request without a task: sent in the moment it is read, answered in the moment its engine answers.

So go those whose engine has room and a kept connection, as long as all goes well. Whatever else happens (it must wait,
the engine refuses, breaks off or is stuck, the time is up), a task takes over what is begun, by the way of all others
in `relay`. A task, its futures and its turns of the loop cost as much as everything else that such a request needs.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamarack.engine.dialects import DIALECTS
from llamarack.gateway.calls import Call, Running
from llamarack.gateway.client_stream import ClientStream
from llamarack.gateway.exchange import Exchange, OpenExchange
from llamarack.gateway.passage import Passage
from llamarack.gateway.upstream import EngineReply

if TYPE_CHECKING:
    from llamarack.gateway.relay import Relay


@dataclass(slots=True, eq=False)
class Begun:
    """What a task takes over. `reply`: of a request that is sent; `passage`: of a stream that has begun."""

    running: Running
    reply: EngineReply | None = None
    client: ClientStream | None = None
    passage: Passage | None = None


Account = Callable[[str], None]
Rest = Callable[[Begun | None], Awaitable[None]]


class Direct:
    """`account`: called once with the status, where no task takes over; `rest`: what a task does with what is begun."""

    __slots__ = ("_account", "_begun", "_call", "_exchange", "_is_over", "_relay", "_rest")

    def __init__(self, relay: Relay, call: Call, exchange: OpenExchange, account: Account, rest: Rest) -> None:
        self._relay = relay
        self._call = call
        self._exchange = exchange
        self._account = account
        self._rest = rest
        self._begun: Begun | None = None
        self._is_over = False

    def start(self) -> None:
        relay, call = self._relay, self._call
        self._exchange.on_left = self._left
        reservation = relay.admission.take_now(call.model, call.demand)
        if reservation is None:
            self._hand_over()
            return
        now = time.monotonic()
        call.queue_s = 0.0
        relay.metrics.queue_wait.observe(call.model, 0.0)
        begun = self._begun = Begun(relay.enter(call, reservation, now))
        row = reservation.row
        if row.endpoint is None or not DIALECTS[row.engine].deviations.keeps_connections:
            self._hand_over()
            return
        begun.reply = relay.engines.post_now(
            row.endpoint, call.engine_path, call.body, relay.headers_of(call), self._moved
        )
        if begun.reply is None:
            self._hand_over()
            return
        begun.running.reply = begun.reply
        call.end_without_task = begun.reply.break_off
        if call.stream:
            begun.client = relay.enter_stream(call)
            begun.client.admitted_monotonic_s = now

    def _moved(self, reply: EngineReply) -> None:
        """Something came from the engine, or its connection ended."""
        if self._is_over:
            return
        if reply.fault is not None or (reply.status and reply.status != 200):
            self._hand_over()
        elif not self._call.stream:
            if reply.is_ended:
                body = reply.whole()
                reply.close()
                self._relay.answer_whole(self._call, body)
                self._end()
        elif reply.status:
            self._stream(reply)

    def _stream(self, reply: EngineReply) -> None:
        begun = self._begun
        assert begun is not None
        assert begun.client is not None
        if begun.passage is None:
            self._exchange.hold()  # the head goes with the first events, if they are here
            begun.client.commit()
            begun.passage = Passage(begun.running, begun.client)
            self._exchange.on_flow = reply.pause
            reply.pass_to(begun.passage.take)
            if not reply.is_done:
                self._exchange.let_go()
        if self._is_over or not reply.is_done:
            return
        events = begun.passage.events
        if not events.state.done or events.state.error is not None:
            self._hand_over()
            return
        self._call.usage = events.state.usage or {}
        self._exchange.on_flow = None
        reply.close()
        begun.client.finish()
        self._relay.leave_stream(begun.client)
        self._end()

    def _end(self) -> None:
        begun, call = self._begun, self._call
        assert begun is not None
        self._is_over = True
        call.end_without_task = None
        self._relay.count(begun.running)
        self._relay.leave(begun.running)
        self._relay.forget(call)
        self._account(str(self._exchange.status))
        self._exchange.done()

    def _hand_over(self) -> None:
        begun = self._begun
        self._is_over = True
        self._call.end_without_task = None
        if begun is not None and begun.reply is not None:
            begun.reply.listener = None
        self._exchange.let_go()

        async def rest(_: Exchange) -> None:
            self._exchange.on_left = None
            await self._rest(begun)

        self._exchange.carry_on(rest)

    def _left(self) -> None:
        """The client did; also in the moment before a task has taken over."""
        begun = self._begun
        self._is_over = True
        self._call.end_without_task = None
        self._exchange.on_flow = None
        if begun is not None:
            if begun.reply is not None:
                begun.reply.close()
            if begun.client is not None:
                self._relay.leave_stream(begun.client)
            self._relay.leave(begun.running)
        self._relay.forget(self._call)
        self._relay.metrics.cancelled.add(1, self._call.model)
        self._account("499")
