"""Waits until the memory of cards comes back after an engine was ended: a driver gives it back a moment after the
processes have gone, and a process that nobody saw may keep it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from llamarack.plan.record import CardPlan

_TIMEOUT_S = 15.0  # Ollama was seen to wait 5 s for the same
_POLL_S = 0.25
_ENOUGH_FRACTION = 0.75  # of what it held: what others took or gave back meanwhile is not told apart

Free = Mapping[str, int | None]


def expected_bytes(cards: Sequence[CardPlan], held: Mapping[str, int]) -> dict[str, int]:
    """What the end of an engine should give back, by card: what it was seen to take, else what was planned."""
    return {card.uuid: held.get(card.uuid, card.total_bytes) for card in cards if card.uuid is not None}


async def missing_bytes(
    expected: Mapping[str, int], before: Free, free: Callable[[], Awaitable[Free]]
) -> dict[str, int]:
    """`before`: what was free while the engine ran. What has not come back in time, by card; empty: enough of it has.

    A card that does not tell its free memory is not waited for.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        now = await free()
        missing: dict[str, int] = {}
        for uuid, bytes_ in expected.items():
            free_before, free_now = before.get(uuid), now.get(uuid)
            if free_before is not None and free_now is not None:
                back = free_now - free_before
                if back < bytes_ * _ENOUGH_FRACTION:
                    missing[uuid] = bytes_ - max(0, back)
        if not missing or time.monotonic() >= deadline:
            return missing
        await asyncio.sleep(_POLL_S)
