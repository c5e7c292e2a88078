"""Does every planned card really hold its share once the engine has loaded? Pure.

The share is what became used on the card between the start and the first answer: it needs no process table, which a
container does not see, and loads are serialised, so that nobody else of ours moves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarack.errors import NeverReady
from llamarack.plan.record import CardPlan
from llamarack.units import format_bytes

# Less than half of its weights: the card is not part of the group. What a plan gets wrong is far from that.
_IDLE_FRACTION = 0.5
# Cards planned alike to 5 % may differ by this part of the larger: the last stage's head, communication buffers.
_ALIKE_FRACTION = 0.05
_SKEW_FRACTION = 0.25


def held_bytes(before: Mapping[str, int | None], after: Mapping[str, int | None]) -> dict[str, int]:
    """What became used, by card; a card that does not tell its free memory is left out."""
    held = {}
    for uuid, free_before in before.items():
        free_after = after.get(uuid)
        if free_before is not None and free_after is not None:
            held[uuid] = max(0, free_before - free_after)
    return held


def require_shares(cards: Sequence[CardPlan], held: Mapping[str, int]) -> None:
    """Raises NeverReady for a card that stayed empty, or for cards planned alike of which one holds much more."""
    known = [(card, held[card.uuid]) for card in cards if card.uuid is not None and card.uuid in held]
    for card, actual in known:
        if actual < card.terms.weights_bytes * _IDLE_FRACTION:
            raise NeverReady(
                f"card {card.index} ({card.name}) holds {format_bytes(actual)} of the {format_bytes(card.total_bytes)} "
                f"planned; {_others(card, known)}",
                hint="the engine did not take the split: look for its devices and split in the log, for "
                "CUDA_VISIBLE_DEVICES in env, and for a build without this card's architecture (llamarack check FILE)",
            )
    for first, first_held in known:
        for second, second_held in known:
            if first_held >= second_held or not _alike(first, second):
                continue
            if second_held - first_held > second_held * _SKEW_FRACTION:
                raise NeverReady(
                    f"card {first.index} holds {format_bytes(first_held)} and card {second.index} "
                    f"{format_bytes(second_held)}, though both were planned for {format_bytes(first.total_bytes)}",
                    hint="somebody else took or gave back memory meanwhile (nvidia-smi), or the engine did not take "
                    "the split; llamarack serve FILE tries again",
                )


def _alike(first: CardPlan, second: CardPlan) -> bool:
    larger = max(first.total_bytes, second.total_bytes)
    return abs(first.total_bytes - second.total_bytes) <= larger * _ALIKE_FRACTION


def _others(card: CardPlan, known: Sequence[tuple[CardPlan, int]]) -> str:
    others = [f"card {other.index} {format_bytes(actual)}" for other, actual in known if other is not card]
    return f"{', '.join(others)} in the same group" if others else "it is the only card of the group"
