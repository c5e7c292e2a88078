"""Is there room on a replica's cards before it is started, and if not, who has it? Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarack.hardware.machine import Card, CardProcess
from llamarack.plan.record import CardPlan
from llamarack.units import MIB, format_bytes

# Free memory moves by some MiB from look to look; the plan's upper bound has its own margin.
_SLACK_BYTES = 64 * MIB
_SHOWN = 3


def card_shortage(plans: Sequence[CardPlan], cards: Sequence[Card], owners: Mapping[int, str]) -> str | None:
    """What is missing on which card, and the processes that hold most there; None where every card has room.

    `owners`: this rack's own processes, by pid.
    """
    by_uuid = {card.uuid: card for card in cards}
    for plan in plans:
        card = by_uuid.get(plan.uuid)
        if card is None or card.memory_free_bytes is None:
            continue
        if card.memory_free_bytes + _SLACK_BYTES < plan.total_high_bytes:
            largest = sorted(card.processes, key=lambda each: -(each.memory_bytes or 0))[:_SHOWN]
            holders = ", ".join(_words(process, owners) for process in largest)
            return (
                f"card {card.index} has {format_bytes(card.memory_free_bytes)} free, "
                f"{format_bytes(plan.total_high_bytes)} are needed" + (f"; {holders}" if holders else "")
            )
    return None


def _words(process: CardProcess, owners: Mapping[int, str]) -> str:
    if process.pid in owners:
        who = f"replica {owners[process.pid]}"
    else:
        user = f", user {process.user}" if process.user else ""
        who = f"process {process.pid}" + (f" ({process.name}{user})" if process.name else "")
    return f"{who} holds {format_bytes(process.memory_bytes)}"
