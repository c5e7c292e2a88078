"""What does CUDA make of CUDA_VISIBLE_DEVICES? Pure: the value and the cards in, the chosen cards and faults out.

CUDA reads the list from the left and stops without a word at the first entry it does not know; the cards after it
are gone. (CUDA C++ Programming Guide, "CUDA Environment Variables".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from llamarack.hardware.machine import Card


class Fault(StrEnum):
    EMPTY = "empty"  # set, but to nothing: no cards
    NONE = "none"  # -1 first: no cards, usually on purpose
    OUT_OF_RANGE = "out_of_range"
    TWICE = "twice"  # CUDA then shows no card at all
    UNKNOWN_UUID = "unknown_uuid"
    AMBIGUOUS_UUID = "ambiguous_uuid"  # a prefix that fits several cards
    NOT_A_CARD = "not_a_card"
    SEVERAL_SLICES = "several_slices"  # a process sees one MIG slice only, the first
    MIG_BY_INDEX = "mig_by_index"  # an index names the whole card, of which CUDA takes the first slice
    MIXED = "mixed"  # indices and UUIDs in one list


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """`cards`: what CUDA shows, in its order. `fault`: the first thing wrong; `entry`: where, as it was written."""

    cards: tuple[Card, ...]
    fault: Fault | None = None
    entry: str | None = None


def visible_cards(value: str | None, cards: Sequence[Card]) -> Visible:
    """`cards`: the machine's, in PCI bus order, which CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA's own."""
    if value is None:
        return Visible(cards=tuple(cards))
    if not value.strip():
        return Visible(cards=(), fault=Fault.EMPTY, entry=value)
    entries = [entry.strip() for entry in value.split(",")]
    if entries[0] == "-1":
        return Visible(cards=(), fault=Fault.NONE, entry="-1")
    chosen: list[Card] = []
    for entry in entries:
        found = _resolve(entry, cards)
        if isinstance(found, Fault):
            return Visible(cards=tuple(chosen), fault=found, entry=entry)
        if found in chosen:
            return Visible(cards=(), fault=Fault.TWICE, entry=entry)
        chosen.append(found)
    if len({entry.isdigit() for entry in entries}) > 1:
        return Visible(cards=tuple(chosen), fault=Fault.MIXED, entry=value)
    slices = [card for card in chosen if card.mig_parent_uuid]
    if slices and len(chosen) > 1:
        return Visible(cards=(slices[0],), fault=Fault.SEVERAL_SLICES, entry=value)
    return Visible(cards=tuple(chosen))


def _resolve(entry: str, cards: Sequence[Card]) -> Card | Fault:
    if entry.lstrip("-").isdigit():
        # CUDA counts whole cards: slices share their card's index.
        wholes = list({card.mig_parent_uuid or card.uuid or str(card.index): card for card in reversed(cards)}.values())
        wholes.sort(key=lambda card: card.index)
        if not 0 <= int(entry) < len(wholes):
            return Fault.OUT_OF_RANGE
        return Fault.MIG_BY_INDEX if wholes[int(entry)].mig_parent_uuid else wholes[int(entry)]
    if not entry.startswith(("GPU-", "MIG-")):
        return Fault.NOT_A_CARD
    named = [card for card in cards if card.uuid is not None and card.uuid.startswith(entry)]
    if not named:
        return Fault.UNKNOWN_UUID
    return named[0] if len(named) == 1 else Fault.AMBIGUOUS_UUID
