"""What this worker asks engines about themselves: KV use for admission, progress and running requests for stuck ones.

Asked over the metrics page and not through the engine's queue, once in a while, and only while there is a question.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from llamarack.engine.dialects import DIALECTS
from llamarack.gateway.admission import Admission, Reservation
from llamarack.gateway.upstream import get_text
from llamarack.supervise.table import ReplicaRow

_LONGEST_INTERVAL_S = 1.0
_TIMEOUT_S = 2.0
# A request sent this moment may not be counted by the engine yet: one look could take it for the stuck one's end.
_PROOFS = 2


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Seen:
    """One engine's own counters. `changed_monotonic_s`: when they last moved, or were first seen."""

    tokens: int | None
    running: int | None
    changed_monotonic_s: float
    proofs: int = 0


class EngineWatch:
    """Owns what was seen, and the reservations that wait for their proof."""

    def __init__(self, admission: Admission, stuck_request_s: float) -> None:
        self._admission = admission
        self._interval_s = min(_LONGEST_INTERVAL_S, stuck_request_s / 4)
        self._seen: dict[str, Seen] = {}  # by endpoint key
        self._unproven: list[Reservation] = []
        # While outputs are not known the guesses are what clients allow: an unused cache then proves no guess wrong.
        self.has_learned: Callable[[str], bool] = lambda model: True
        self.suspects: Callable[[], set[str]] = set  # replicas of requests whose progress is not seen in their replies

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._round()
            except Exception:
                log.exception("engine_watch")  # the next round may do better; without it no stuck slot would be freed

    async def _round(self) -> None:
        rows = {row.id: row for row in self._admission.table.replicas if row.endpoint is not None}
        self._free_those_of_dead_engines(rows)
        wanted = self.suspects() | {each.id for each in self._unproven}
        wanted |= {row.id for row in rows.values() if self._shares_its_cache(row)}
        await asyncio.gather(*(self._look(rows[id]) for id in wanted if id in rows))
        live = {row.endpoint.key for row in rows.values() if row.endpoint is not None}
        self._seen = {key: seen for key, seen in self._seen.items() if key in live}

    def hold(self, reservation: Reservation) -> None:
        """Its request was given up; the slot stays taken until the engine shows that it is free."""
        self._admission.mark_stuck(reservation)
        self._unproven.append(reservation)

    def still_s(self, row: ReplicaRow) -> float:
        """How long the engine as a whole has made no token that anybody saw; 0 where it does not tell."""
        seen = self._seen.get(row.endpoint.key) if row.endpoint is not None else None
        if seen is None or seen.tokens is None:
            return 0.0
        return time.monotonic() - seen.changed_monotonic_s

    async def _look(self, row: ReplicaRow) -> None:
        assert row.endpoint is not None
        text = await get_text(row.endpoint, "/metrics", _TIMEOUT_S)
        if text is None:
            return
        dialect = DIALECTS[row.engine]
        use = dialect.kv_use(text)
        if use is not None:
            self._admission.see(row, use, has_learned=self.has_learned(row.model))
        counters = dialect.counters(text)
        parts = [part for part in (counters.generated_tokens, counters.prompt_tokens) if part is not None]
        running = [part for part in (counters.running, counters.waiting) if part is not None]
        self._note(row, sum(parts) if parts else None, sum(running) if running else None)

    def _note(self, row: ReplicaRow, tokens: int | None, running: int | None) -> None:
        assert row.endpoint is not None
        seen = self._seen.get(row.endpoint.key)
        if seen is None:
            seen = self._seen[row.endpoint.key] = Seen(tokens, running, time.monotonic())
        if tokens != seen.tokens:
            seen.changed_monotonic_s = time.monotonic()
        seen.tokens, seen.running = tokens, running
        mine = [each for each in self._unproven if each.id == row.id]
        if not mine:
            seen.proofs = 0
            return
        stuck = self._admission.stuck_of_all(row.id)
        is_free = running is None or running <= self._admission.in_flight_of_all(row.id) - stuck
        seen.proofs = seen.proofs + 1 if is_free else 0
        if seen.proofs >= _PROOFS:
            seen.proofs = 0
            self._free(mine)

    def _free_those_of_dead_engines(self, rows: dict[str, ReplicaRow]) -> None:
        """An engine that ended has no slot to be stuck in; its next life has another key."""
        gone = []
        for each in self._unproven:
            row = rows.get(each.id)
            if row is None or row.endpoint is None or row.endpoint != each.row.endpoint:
                gone.append(each)
        self._free(gone)

    def _free(self, reservations: list[Reservation]) -> None:
        for each in reservations:
            self._unproven.remove(each)
            self._admission.give(each)

    def _shares_its_cache(self, row: ReplicaRow) -> bool:
        """Then what it holds decides who goes on."""
        if row.engine != "vllm":
            return row.kv_tokens is not None and bool(self._admission.in_flight.get(row.id))
        return row.endpoint is not None and (
            row.endpoint.key not in self._admission.pools or bool(self._admission.in_flight.get(row.id))
        )
