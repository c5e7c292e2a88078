"""What passed through the gateway in the last five minutes: counted by its workers, added up by the supervisor.

Counts lie in slots of wall-clock time, so that several workers add up and a report carries only the slots that moved.
Latencies lie in buckets that grow by 5 %: a quantile is right to 2.5 %, and buckets of several workers add up too.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SLOT_S = 5
SLOTS = 60
_GROWTH = 1.05
_QUANTILES = {"p50": (0.5, 1), "p90": (0.9, 10), "p99": (0.99, 100)}  # share, values it needs


@dataclass(slots=True)
class Slot:
    """Five seconds of one model. `failures`: answers 5xx; `first_token`, `per_token`: bucket -> count."""

    tokens: int = 0
    requests: int = 0
    failures: int = 0
    first_token: dict[str, int] = field(default_factory=dict)
    per_token: dict[str, int] = field(default_factory=dict)


class TrafficLog:
    """One worker's slots by model: written by the worker that owns it, or filled from its reports."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.models: dict[str, dict[int, Slot]] = {}
        self._moved: set[tuple[str, int]] = set()

    def count_tokens(self, model: str, tokens: int) -> None:
        """May be negative: an engine's own count corrects what its events let one think."""
        if tokens:
            self._slot(model).tokens += tokens

    def count_request(
        self, model: str, *, failed: bool, first_token_s: float | None, per_token_s: float | None, tokens: int = 0
    ) -> None:
        """`tokens`: that were not counted yet; as in `count_tokens`."""
        slot = self._slot(model)
        slot.tokens += tokens
        slot.requests += 1
        slot.failures += failed
        for buckets, seconds in ((slot.first_token, first_token_s), (slot.per_token, per_token_s)):
            if seconds is not None:
                bucket = _bucket_of(seconds)
                buckets[bucket] = buckets.get(bucket, 0) + 1

    def report(self, *, whole: bool = False) -> dict[str, Any]:
        """The slots that moved since the last report (`whole`: all), as JSON; empty when none did."""
        moved = {(model, at) for model, slots in self.models.items() for at in slots} if whole else self._moved
        out: dict[str, Any] = {}
        for model, at in sorted(moved):
            if at in self.models[model]:
                out.setdefault(model, {})[str(at)] = asdict(self.models[model][at])
        self._moved = set()
        return out

    def take(self, report: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """A worker's report: its newer view of a slot replaces the older one."""
        for model, slots in report.items():
            for at, slot in slots.items():
                self._keep(model, int(at), Slot(**slot))

    def _slot(self, model: str) -> Slot:
        at = int(self._clock() // SLOT_S)
        self._moved.add((model, at))
        slot = self.models.get(model, {}).get(at)
        if slot is None:
            slot = Slot()
            self._keep(model, at, slot)
        return slot

    def _keep(self, model: str, at: int, slot: Slot) -> None:
        slots = self.models.setdefault(model, {})
        slots[at] = slot
        for old in [each for each in slots if each <= at - SLOTS]:
            del slots[old]


def traffic_record(model: str, logs: Iterable[TrafficLog], now_unix_s: float) -> dict[str, Any]:
    """One model over all workers. Rates: of the last five to ten seconds; quantiles: of the whole window.

    `tokens_per_s_history` has one value for each slot, oldest first, the running one left out.
    """
    current = int(now_unix_s // SLOT_S)
    first = current - SLOTS + 1
    window = [(at, slot) for log in logs for at, slot in log.models.get(model, {}).items() if first <= at <= current]
    recent = [slot for at, slot in window if at >= current - 1]
    recent_s = SLOT_S + now_unix_s - current * SLOT_S
    tokens = [0] * SLOTS
    for at, slot in window:
        tokens[at - first] += slot.tokens
    return {
        "model": model,
        "window_s": SLOT_S * SLOTS,
        "tokens_per_s": max(0, sum(slot.tokens for slot in recent)) / recent_s,
        "requests_per_s": sum(slot.requests for slot in recent) / recent_s,
        "tokens": max(0, sum(slot.tokens for _, slot in window)),
        "requests": sum(slot.requests for _, slot in window),
        "failures": sum(slot.failures for _, slot in window),
        "first_token_s": _quantiles(slot.first_token for _, slot in window),
        "per_token_s": _quantiles(slot.per_token for _, slot in window),
        "tokens_per_s_history": [max(0, count) / SLOT_S for count in tokens[:-1]],
    }


def _bucket_of(seconds: float) -> str:
    return str(round(math.log(max(seconds, 1e-6), _GROWTH)))


def _quantiles(parts: Iterable[Mapping[str, int]]) -> dict[str, Any]:
    """Nearest-rank quantiles; null where the count cannot support one (p90 needs 10, p99 needs 100)."""
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update({int(bucket): count for bucket, count in part.items()})
    total = counts.total()
    out: dict[str, Any] = {"n": total}
    for name, (share, needed) in _QUANTILES.items():
        out[name] = _GROWTH ** _bucket_at(counts, math.ceil(share * total)) if total >= needed else None
    return out


def _bucket_at(counts: Mapping[int, int], rank: int) -> int:
    """The bucket that holds the `rank`-th smallest value, counted from 1."""
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return bucket
    raise ValueError(f"rank {rank} of {seen} values")
