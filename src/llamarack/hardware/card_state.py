"""One look at the cards as records. Pure: the same readings, live or recorded, give the same states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamarack.hardware.cards import THROTTLE_REASONS
from llamarack.hardware.machine import CardProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """`utilisation_fraction`: of the time in which any kernel ran; `memory_utilisation_fraction`: in which memory was
    read or written. `xids`: driver faults since the last look.
    """

    index: int
    uuid: str | None
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    processes: tuple[CardProcess, ...] = ()
    utilisation_fraction: float | None = None
    memory_utilisation_fraction: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_hz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    ecc_uncorrected: int | None = None
    xids: tuple[int, ...] = ()


def card_states(reading: dict[str, Any]) -> tuple[CardState, ...]:
    """In the order of `hardware.machine.Machine.cards`; a card that tells no memory is left out, as there."""
    told = [card for card in reading["cards"] if card["memory"] is not None]
    return tuple(_state(index, card) for index, card in enumerate(told))


def _state(index: int, card: dict[str, Any]) -> CardState:
    memory, mask = card["memory"], card["throttle_mask"] or 0
    return CardState(
        index=index,
        uuid=card["uuid"],
        name=card["name"] or "NVIDIA GPU",
        memory_total_bytes=memory["total"],
        memory_used_bytes=memory["used"],
        processes=tuple(
            CardProcess(pid=each["pid"], memory_bytes=each["memory"], name=each["name"], user=each["user"])
            for each in card["processes"]
        ),
        utilisation_fraction=_scaled(card["utilisation_percent"], 100),
        memory_utilisation_fraction=_scaled(card["memory_utilisation_percent"], 100),
        power_w=_scaled(card["power_mw"], 1000),
        temperature_c=card["temperature_c"],
        sm_clock_hz=_scaled(card["sm_clock_mhz"], 1e-6),
        throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit),
        ecc_uncorrected=card["ecc_uncorrected"],
        xids=tuple(card["xids"]),
    )


def _scaled(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor
