"""The rack behind a target, where it is one of this machine: what it runs on, and its memory while it is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarack.config import Deployment
from llamarack.errors import NothingRunning
from llamarack.hardware.machine import Card
from llamarack.paths import RackPaths
from llamarack.supervise.admin import ask

INTERVAL_S = 2.0  # the rack walks its processes for an answer: seldom enough not to be seen in the figures


@dataclass(frozen=True, slots=True, kw_only=True)
class RackSource:
    """`deployment`: what it was started from."""

    paths: RackPaths
    deployment: Deployment

    async def status(self) -> dict[str, Any]:
        """Raises NothingRunning."""
        return await ask(self.paths, {"op": "status"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """`used_bytes` by name: `card 0 (NVIDIA H200)`, `smollm2-0, host memory`."""

    at_monotonic_ns: int
    used_bytes: Mapping[str, int]
    total_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeries:
    """One card or one replica over the run. `total_bytes`: the card's; None for a replica's host memory."""

    name: str
    total_bytes: int | None
    at_monotonic_ns: tuple[int, ...]
    used_bytes: tuple[int, ...]


def memory_reading(record: Mapping[str, Any], at_monotonic_ns: int) -> MemoryReading:
    """From a `status` record: cards where it lists them, and host memory of replicas that use no card."""
    used: dict[str, int] = {}
    total: dict[str, int] = {}
    for card in record.get("cards", ()):
        if card["memory_used_bytes"] is not None:
            name = f"card {card['index']} ({card['name']})"
            used[name], total[name] = card["memory_used_bytes"], card["memory_total_bytes"]
    for model in record["models"]:
        for replica in model["replicas"]:
            resident = replica["actual"]["resident_bytes"]
            if not replica["cards"] and resident is not None:
                used[f"{replica['id']}, host memory"] = resident
    return MemoryReading(at_monotonic_ns=at_monotonic_ns, used_bytes=used, total_bytes=total)


def memory_series(readings: Sequence[MemoryReading]) -> tuple[MemorySeries, ...]:
    names = dict.fromkeys(name for reading in readings for name in reading.used_bytes)
    series = []
    for name in names:
        kept = [reading for reading in readings if name in reading.used_bytes]
        series.append(
            MemorySeries(
                name=name,
                total_bytes=kept[-1].total_bytes.get(name),
                at_monotonic_ns=tuple(reading.at_monotonic_ns for reading in kept),
                used_bytes=tuple(reading.used_bytes[name] for reading in kept),
            )
        )
    return tuple(series)


def fullest_card_fraction(record: Mapping[str, Any], cards: Sequence[Card]) -> float | None:
    """Of all cards that the rack uses, as the driver counts them now; None on a processor."""
    mine = {uuid for model in record["models"] for replica in model["replicas"] for uuid in replica["cards"]}
    shares = [
        1 - card.memory_free_bytes / card.memory_total_bytes
        for card in cards
        if (card.uuid or str(card.index)) in mine and card.memory_free_bytes is not None
    ]
    return max(shares, default=None)


async def sample_memory(rack: RackSource, readings: list[MemoryReading]) -> None:
    """Appends a reading every `INTERVAL_S` until cancelled; gives up where the rack is gone."""
    while True:
        try:
            record = await rack.status()
        except NothingRunning:
            return
        readings.append(memory_reading(record, time.monotonic_ns()))
        await asyncio.sleep(INTERVAL_S)
