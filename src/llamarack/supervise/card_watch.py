"""The cards as a child of this rack sees them, at an interval: states, history, findings.

A driver that stalls stalls the child alone; it is left behind, said so, and another is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamarack.hardware.card_state import CardState, card_states
from llamarack.hardware.probe import module_command
from llamarack.supervise.card_findings import Planned, bound_by, card_findings, only_new
from llamarack.supervise.journal import Journal

_HISTORY = 720  # an hour at 5 s
_HISTORY_SHOWN = 120
_START_S = 20.0  # nvmlInit on 8 cards with persistence off takes some seconds
_AGAIN_S = 30.0
_MAX_LINE_BYTES = 4 * 1024**2


class CardWatch:
    """`owners`: pids of the rack's engines with their replica, asked at each look; `planned`: by card UUID."""

    def __init__(
        self,
        journal: Journal,
        sample_s: float,
        *,
        owners: Callable[[], Mapping[int, str]],
        planned: Callable[[], Mapping[str, Planned]],
        engine_cores: Callable[[Sequence[str]], float | None],
        has_work: Callable[[Sequence[str]], bool],
        command: Sequence[str] | None = None,
        again_s: float = _AGAIN_S,
    ) -> None:
        self._journal = journal
        self._sample_s = sample_s
        self._owners = owners
        self._planned = planned
        self._engine_cores = engine_cores
        self._has_work = has_work
        self._command = command or module_command("telemetry", f"{sample_s:g}")
        self._again_s = again_s
        self._known: set[str] = set()
        self._xid: dict[str | None, int] = {}
        self._history: dict[str | None, deque[tuple[float, int]]] = {}
        self._bound: dict[str | None, str | None] = {}
        self.states: tuple[CardState, ...] = ()
        self.at_unix_s: float | None = None

    async def run(self) -> None:
        """Until cancelled, or until it is clear that there is no card."""
        while await self._with_child():  # noqa: ASYNC110 - a pause, not a wait
            await asyncio.sleep(self._again_s)

    async def _with_child(self) -> bool:
        """One child to its end. False: there is nothing to see on this machine."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
        )
        assert process.stdout is not None
        patience_s = _START_S
        try:
            while True:
                async with asyncio.timeout(patience_s):
                    line = await process.stdout.readline()
                if not line:
                    self._journal.warn("telemetry_ended", "the look at the cards ended; tried again later")
                    return True
                reading = json.loads(line)
                if reading["status"] in {"absent", "no_driver"}:
                    return False
                if reading["status"] != "ok":
                    self._journal.warn("telemetry_failed", f"NVIDIA's driver answers: {reading['detail']}")
                    return True
                patience_s = max(5.0, 4 * self._sample_s)
                self._take(reading)
        except TimeoutError:
            self._journal.warn(
                "telemetry_stalled",
                f"NVIDIA's driver has not answered for {patience_s:g} s; serving goes on unwatched",
                hint="sudo dmesg | grep -iE 'xid|nvrm'; nvidia-smi",
            )
            return True
        except ValueError as error:
            self._journal.warn("telemetry_failed", f"the look at the cards cannot be read: {error}")
            return True
        finally:
            self.states, self.at_unix_s = (), None  # what is old is not shown as if it were known
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):  # a child that the kernel holds is left behind
                async with asyncio.timeout(1.0):
                    await process.wait()

    def _take(self, reading: dict[str, Any]) -> None:
        before = {card.uuid: card for card in self.states}
        self.states, self.at_unix_s = card_states(reading), time.time()
        owners, planned = self._owners(), self._planned()
        found = []
        for card in self.states:
            self._history.setdefault(card.uuid, deque(maxlen=_HISTORY)).append((self.at_unix_s, card.memory_used_bytes))
            if card.xids:
                self._xid[card.uuid] = card.xids[-1]
            here = sorted({owners[process.pid] for process in card.processes if process.pid in owners})
            self._bound[card.uuid] = bound_by(card, self._engine_cores(here), owners, self._has_work(here))
            found += card_findings(card, before.get(card.uuid), owners, planned.get(card.uuid or ""))
        for finding in only_new(found, self._known):
            tell = self._journal.error if finding.severity == "error" else self._journal.warn
            tell(finding.kind, finding.message, hint=finding.hint, **finding.data)

    def record(self) -> list[dict[str, Any]]:
        """`cards[]` of the status record."""
        owners = self._owners()
        return [
            {
                "index": card.index,
                "uuid": card.uuid,
                "name": card.name,
                "memory_total_bytes": card.memory_total_bytes,
                "memory_used_bytes": card.memory_used_bytes,
                "memory_by_owner": [
                    {"pid": process.pid, "replica": owners.get(process.pid), "bytes": process.memory_bytes}
                    for process in card.processes
                ],
                "utilisation_fraction": card.utilisation_fraction,
                "memory_utilisation_fraction": card.memory_utilisation_fraction,
                "bound_by": self._bound.get(card.uuid),
                "power_w": card.power_w,
                "temperature_c": card.temperature_c,
                "sm_clock_hz": card.sm_clock_hz,
                "throttle_reasons": list(card.throttle_reasons),
                "ecc_uncorrected": card.ecc_uncorrected,
                "xid": self._xid.get(card.uuid),
                "history": [
                    {"at": at, "memory_used_bytes": used} for at, used in _thinned(self._history.get(card.uuid, ()))
                ],
            }
            for card in self.states
        ]


def _thinned(history: Any) -> list[tuple[float, int]]:
    """Evenly, the newest included."""
    points = list(history)
    stride = -(-len(points) // _HISTORY_SHOWN) or 1
    return points[::-1][::stride][::-1]
