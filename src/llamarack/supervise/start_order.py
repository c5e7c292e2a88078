"""What a start waits for before a process is made: room on its cards, and the end of other loads on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

from llamarack.hardware.loadlock import LoadLock
from llamarack.supervise.journal import Journal
from llamarack.supervise.post_mortem import NoRoom
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.units import format_duration

_LOAD_LOCK_POLL_S = 0.1
_ROOM_POLL_S = 2.0

Pause = Callable[[float], Awaitable[None]]  # of so many seconds; raises when the replica is asked to stop meanwhile


async def until_room(
    spec: ReplicaSpec, shortage: Callable[[ReplicaSpec], Awaitable[str | None]], journal: Journal, pause: Pause
) -> None:
    """Until the cards have what the plan needs: somebody else's process, or the engine before this one, may still hold
    it. `shortage`: in words. Raises NoRoom when that takes as long as a start may."""
    told, since = False, time.monotonic()
    while spec.card_uuids:
        short = await shortage(spec)
        if short is None:
            return
        if time.monotonic() - since >= spec.start_deadline_s:
            raise NoRoom(
                f"no room for {format_duration(spec.start_deadline_s)}: {short}",
                hint="end what holds it, or plan around it: llamarack plan FILE; nothing of others is ended here",
            )
        if not told:
            told = True
            journal.warn("memory_waits", f"waits for memory: {short}", replica=spec.id)
        await pause(_ROOM_POLL_S)


async def take_load_lock(lock: LoadLock, replica: str, journal: Journal, pause: Pause) -> None:
    """One load at a time on this machine, whoever starts it."""
    told = False
    while not lock.try_acquire():
        if not told:
            holder = lock.holder_pid()
            by = f" (process {holder})" if holder and holder != os.getpid() else ""
            journal.note("load_waits", f"waits for another load to end{by}", replica=replica)
            told = True
        await pause(_LOAD_LOCK_POLL_S)
