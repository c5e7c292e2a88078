"""The devices a plan is made for: cards by index or UUID, the host as a device, and what one will show. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llamarack.config import Group
from llamarack.errors import ConfigError, HardwareError
from llamarack.hardware.machine import Card, Host, Machine
from llamarack.plan.record import CPU_INDEX, CardPlan, Terms
from llamarack.units import GIB, format_bytes

TIGHT_BYTES = GIB  # drivers start to spill to host memory within about 1 GiB of full (unslothai/unsloth #6704)


def card_of(machine: Machine, reference: int | str) -> Card:
    """A card by index or UUID. Raises HardwareError naming the cards there are."""
    for card in (*machine.cards, *machine.remotes):
        if reference in (card.index, card.uuid):
            return card
    there = ", ".join(f"{card.index} ({card.name})" for card in machine.cards) or "no cards"
    raise HardwareError(f"`gpus`: card `{reference}` is not in this machine", hint=f"it has {there}")


def remote_cards(machine: Machine, group: Group) -> tuple[Card, ...]:
    """Devices of the group's RPC servers, in the order in which the engine takes them. Raises ConfigError for a server
    whose devices are not known."""
    found: list[Card] = []
    for address in group.rpc_addresses():
        own = [card for card in machine.remotes if card.rpc_server == address.endpoint]
        if not own:
            raise ConfigError(
                f"`rpc_servers`: the devices of {address.endpoint} are not known here",
                hint=f"rpc_servers: ['{address.endpoint}=24GiB'] gives the memory of each of its devices",
            )
        found += own
    return tuple(found)


def place_of(card: CardPlan) -> str:
    """A device in a sentence."""
    if card.index == CPU_INDEX:
        return "memory"
    return card.name if card.index < CPU_INDEX else f"card {card.index} ({card.name})"


def free_bytes(device: Card | Host, claimed: Mapping[int, int]) -> int:
    """Free memory of a device less what other replicas of the plan have claimed."""
    if isinstance(device, Host):
        return device.memory_available_bytes - claimed.get(CPU_INDEX, 0)
    free = device.memory_total_bytes if device.memory_free_bytes is None else device.memory_free_bytes
    return free - claimed.get(device.index, 0)


def device_plan(device: Card | Host, terms: Terms, high_bytes: int, claimed: Mapping[int, int]) -> CardPlan:
    """`high_bytes`: upper end of the terms' sum."""
    free = free_bytes(device, claimed)
    return CardPlan(
        index=CPU_INDEX if isinstance(device, Host) else device.index,
        name="CPU" if isinstance(device, Host) else device.name,
        uuid=None if isinstance(device, Host) else device.uuid,
        memory_total_bytes=device.memory_total_bytes,
        memory_free_bytes=free,
        terms=terms,
        total_bytes=terms.total_bytes,
        total_high_bytes=max(high_bytes, terms.total_bytes),
        free_after_bytes=free - terms.total_bytes,
    )


def shortage(card: CardPlan) -> str | None:
    """Why this card is too small, in words; None where it fits."""
    free = card.memory_free_bytes if card.memory_free_bytes is not None else card.memory_total_bytes
    if card.total_high_bytes <= free:
        return None
    weights, kv = card.terms.weights_bytes, card.terms.kv_bytes
    return (
        f"{place_of(card)} needs {format_bytes(card.total_high_bytes)} (weights {format_bytes(weights)}, KV "
        f"{format_bytes(kv)}, rest {format_bytes(card.total_high_bytes - weights - kv)}), "
        f"{format_bytes(max(free, 0))} free"
    )


def is_tight(cards: Iterable[CardPlan]) -> bool:
    return any(
        (card.memory_free_bytes if card.memory_free_bytes is not None else card.memory_total_bytes)
        - card.total_high_bytes
        < TIGHT_BYTES
        for card in cards
    )


def replica_cards(machine: Machine, lists: list[list[int | str]]) -> tuple[tuple[Card, ...], ...]:
    """Cards of every replica. Raises ConfigError for a card given twice in one replica."""
    replicas = tuple(tuple(card_of(machine, reference) for reference in cards) for cards in lists)
    for cards in replicas:
        indices = [card.index for card in cards]
        if len(set(indices)) != len(indices):
            raise ConfigError(
                f"`gpus`: a replica names a card twice: {indices}", hint="give each card once per replica"
            )
    return replicas


def claim(held: dict[int, int], cards: Iterable[CardPlan], host_bytes: int = 0) -> None:
    """Add what one replica takes to `held`. Mapped weights on the CPU are the same pages for every replica."""
    for card in cards:
        shared = card.terms.weights_bytes if card.index == CPU_INDEX else 0
        held[card.index] = held.get(card.index, 0) + card.total_high_bytes - shared
    held[CPU_INDEX] = held.get(CPU_INDEX, 0) + host_bytes
