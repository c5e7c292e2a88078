"""What the workers of one gateway tell each other: reservations and queues, in a file that they all map.

Each worker writes a part of its own and reads the others'; whoever decides holds the file's lock, so that two workers
never give away one slot. A worker that dies drops the lock with its process, and its part is cleared by its
successor. What is in a part is JSON, so that workers need not agree on an order of replicas.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from llamarack.gateway.capacity import NOTHING, Held

_PART_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")
# The lock is held for microseconds; longer means a worker that was stopped in the middle, and an engine's own queue
# bears one request too many better than this worker bears standing still.
_LOCK_PATIENCE_S = 0.05
_LOCK_RETRY_S = 0.0002

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Part:
    """One worker's. `oldest`: since when its first waiter of a model waits, on the machine's monotonic clock.
    `callers`: by key name, requests running, the minute and its requests, the day and its tokens."""

    held: dict[str, Held] = field(default_factory=dict)
    stuck: dict[str, int] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)
    oldest: dict[str, float] = field(default_factory=dict)
    callers: dict[str, tuple[int, int, int, int, int]] = field(default_factory=dict)


class Ledger:
    """This worker's part and a view of the others'. Used inside `locked()` only, but for reading what is shown."""

    def __init__(self, folder: Path, worker: int, workers: int) -> None:
        self._worker = worker
        self._workers = workers
        self._fd = os.open(folder / "gateways.ledger", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = workers * _PART_BYTES
        if os.fstat(self._fd).st_size < size:
            os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self._read: dict[int, tuple[bytes, Part]] = {}
        self._bells = [str(folder / f"gateway-{number}.bell") for number in range(workers)]
        self.bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.bell.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._bells[worker])
        self.bell.bind(self._bells[worker])
        with self.locked():
            self.publish(Part())

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)
        self.bell.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._bells[self._worker])

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        taken = self._take_lock()
        try:
            yield
        finally:
            if taken:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _take_lock(self) -> bool:
        give_up_at = 0.0
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                now = time.monotonic()
                give_up_at = give_up_at or now + _LOCK_PATIENCE_S
                if now >= give_up_at:
                    log.warning("ledger_lock_late worker=%d", self._worker)
                    return False
                time.sleep(_LOCK_RETRY_S)

    def publish(self, part: Part) -> None:
        data = orjson.dumps(
            {
                "held": {name: (held.slots, held.tokens) for name, held in part.held.items()},
                "stuck": part.stuck,
                "queued": part.queued,
                "oldest": part.oldest,
                "callers": part.callers,
            }
        )
        if len(data) > _PART_BYTES - _LENGTH.size:  # thousands of keys at once: their shares stay with each worker
            return self.publish(Part(held=part.held, stuck=part.stuck, queued=part.queued, oldest=part.oldest))
        start = self._worker * _PART_BYTES
        self._map[start : start + _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
        return None

    def others(self) -> list[tuple[int, Part]]:
        """By worker; a part that is not to be read (its owner died in the middle of writing) counts as empty."""
        return [(number, self._part(number)) for number in range(self._workers) if number != self._worker]

    def ring(self, worker: int) -> None:
        """Wakes a worker whose waiter may go on."""
        with contextlib.suppress(OSError):  # it is being started again, or has been rung often enough
            self.bell.sendto(b".", self._bells[worker])

    def hush(self) -> None:
        """Takes the rings that have come."""
        with contextlib.suppress(BlockingIOError):
            while self.bell.recv(16):
                pass

    def _part(self, worker: int) -> Part:
        start = worker * _PART_BYTES
        (length,) = _LENGTH.unpack(self._map[start : start + _LENGTH.size])
        data = self._map[start + _LENGTH.size : start + _LENGTH.size + min(length, _PART_BYTES)]
        known = self._read.get(worker)
        if known is not None and known[0] == data:
            return known[1]
        part = _parsed(data)
        self._read[worker] = (data, part)
        return part


def _parsed(data: bytes) -> Part:
    try:
        value = orjson.loads(data)
        return Part(
            held={name: Held(slots=held[0], tokens=held[1]) for name, held in value["held"].items()},
            stuck=value["stuck"],
            queued=value["queued"],
            oldest=value["oldest"],
            callers={name: (a, b, c, d, e) for name, (a, b, c, d, e) in value["callers"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return Part()


def total_held(replica: str, own: Held, others: list[tuple[int, Part]]) -> Held:
    for _, part in others:
        own = own.plus(part.held.get(replica, NOTHING))
    return own
