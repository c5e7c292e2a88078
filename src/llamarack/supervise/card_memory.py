"""What an engine holds on its cards: measured around its start, and waited for after its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from llamarack.errors import LlamarackError
from llamarack.supervise.card_return import expected_bytes, missing_bytes
from llamarack.supervise.card_share import held_bytes
from llamarack.supervise.journal import Journal
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.units import format_bytes

_LOOK_S = 5.0

Free = Mapping[str, int | None]  # bytes by UUID; None where a card does not tell


class CardMemory:
    """Of one replica. `held_bytes`: by UUID, what its newest start took; empty on the processor."""

    def __init__(self, free_bytes: Callable[[], Awaitable[Free]], journal: Journal) -> None:
        self._free_bytes = free_bytes
        self._journal = journal
        self.held_bytes: dict[str, int] = {}

    async def free_bytes(self, spec: ReplicaSpec) -> Free:
        """Of its cards; empty on the processor. Raises HardwareError."""
        if not spec.card_uuids:
            return {}
        free = await self._free_bytes()
        return {uuid: free[uuid] for uuid in spec.card_uuids if uuid in free}

    async def free_bytes_if_told(self, spec: ReplicaSpec) -> Free:
        """Empty where the driver fails or stalls: a lost card must not keep an engine from its end."""
        try:
            async with asyncio.timeout(_LOOK_S):
                return await self.free_bytes(spec)
        except (LlamarackError, OSError, TimeoutError):
            return {}

    async def note_held(self, spec: ReplicaSpec, before: Free) -> None:
        """`before`: what was free when the start began. Raises HardwareError."""
        self.held_bytes = held_bytes(before, await self.free_bytes(spec))

    async def until_back(self, spec: ReplicaSpec, before: Free) -> None:
        """After its end. `before`: what was free while it ran."""
        if not before:
            return
        expected = expected_bytes(spec.candidate.cards, self.held_bytes)
        missing = await missing_bytes(expected, before, lambda: self.free_bytes_if_told(spec))
        for uuid, bytes_ in missing.items():
            self._journal.warn(
                "memory_not_back",
                f"all of its processes have gone, but {format_bytes(bytes_)} of card {uuid} have not come back",
                replica=spec.id,
                hint="nvidia-smi tells who holds it; the next start waits for room",
                card=uuid,
                missing_bytes=bytes_,
            )
