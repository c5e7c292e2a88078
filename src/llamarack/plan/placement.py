"""Which ways there are to put a model on a machine: engine, cards per replica, how they share, how many replicas. Pure.

Lists them; `planner` weighs them. Cards of one kind (same name and memory) form groups; unequal cards are only ever
mixed where the engine can use them: llama.cpp by layers, or as separate replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from llamarack.hardware.machine import Card, LinkKind, Machine
from llamarack.plan.exchange import all_reduce_s, worst_link
from llamarack.plan.shape import ModelShape
from llamarack.units import format_duration

# Over PCIe a cut is senseless once summing partial results takes this many times the arithmetic it shares out.
_SENSELESS_EXCHANGE = 3.0
_PREFILL_TOKENS = 4096
_PREFILL_ARITHMETIC = 0.7  # share of the dense peak, the lowest of speed.yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`replicas`: cards of each, in the engine's order; empty for the CPU."""

    engine: str
    replicas: tuple[tuple[Card, ...], ...]
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    split_mode: str = "none"


def ways(engine: str, machine: Machine, most_replicas: int) -> Iterator[Way]:
    """Every way, legal or not; more replicas than `most_replicas` (the concurrency) would stand idle."""
    if not machine.cards:
        yield from _ways_of_host(engine, machine.host.cores_usable, most_replicas)
        return
    sets = kinds(machine)
    for cards in sets:
        yield from _ways_of_kind(engine, cards, most_replicas)
    if len(sets) > 1:
        yield from _mixed_ways(engine, sets, most_replicas)


def _ways_of_host(engine: str, cores: int, most_replicas: int) -> Iterator[Way]:
    """One copy on all cores, or several that share them evenly: fewer threads wait for each other at every layer."""
    count = 1
    while count == 1 or (engine == "llamacpp" and count <= min(cores, most_replicas) and cores % count == 0):
        yield Way(engine=engine, replicas=((),) * count)
        count *= 2


def kinds(machine: Machine) -> list[tuple[Card, ...]]:
    """Cards that are alike, in order; a card that was cut into MIG slices is not one of them."""
    cut = {card.mig_parent_uuid for card in machine.cards if card.mig_parent_uuid}
    found: dict[tuple[str, int, bool], list[Card]] = {}
    for card in machine.cards:
        if card.uuid is None or card.uuid not in cut:
            key = (card.name, card.memory_total_bytes, card.mig_parent_uuid is not None)
            found.setdefault(key, []).append(card)
    return [tuple(cards) for cards in found.values()]


def _ways_of_kind(engine: str, cards: Sequence[Card], most_replicas: int) -> Iterator[Way]:
    for size in range(1, len(cards) + 1):
        hands = _neighbours(cards, size)
        for count in range(min(len(hands), most_replicas), 0, -1):
            replicas = tuple(hands[:count])
            if engine == "vllm":
                for tensor, pipeline in _factors(size):
                    yield Way(engine=engine, replicas=replicas, tensor_parallel=tensor, pipeline_parallel=pipeline)
            elif size == 1:
                yield Way(engine=engine, replicas=replicas)
            else:
                yield Way(engine=engine, replicas=replicas, split_mode="layer")
                yield Way(engine=engine, replicas=replicas, split_mode="tensor")


def _mixed_ways(engine: str, sets: Sequence[tuple[Card, ...]], most_replicas: int) -> Iterator[Way]:
    """Unequal cards in one replica, by kinds; and replicas on every kind with the fewest cards each."""
    for size in range(2, len(sets) + 1):
        for chosen in combinations(sets, size):
            cards = tuple(sorted((card for kind in chosen for card in kind), key=lambda card: card.index))
            if engine == "vllm":
                yield Way(engine=engine, replicas=(cards,), tensor_parallel=len(cards))
                yield Way(engine=engine, replicas=(cards,), pipeline_parallel=len(cards))
            else:
                yield Way(engine=engine, replicas=(cards,), split_mode="layer")
    if engine == "llamacpp":
        for sizes in _sizes(sets):
            hands = [hand for kind, size in zip(sets, sizes, strict=True) for hand in _neighbours(kind, size)]
            if 1 < len(hands) <= most_replicas:
                mode = "layer" if max(sizes) > 1 else "none"
                yield Way(engine=engine, replicas=tuple(hands), split_mode=mode)


def _sizes(sets: Sequence[tuple[Card, ...]]) -> Iterator[tuple[int, ...]]:
    """Cards per replica on each kind: one card, or all of the kind."""
    options = [sorted({1, len(kind)}) for kind in sets]
    combined: list[tuple[int, ...]] = [()]
    for option in options:
        combined = [(*sizes, size) for sizes in combined for size in option]
    yield from combined


def _neighbours(cards: Sequence[Card], size: int) -> list[tuple[Card, ...]]:
    """Disjoint hands of `size` cards; a pair that is linked by NVLink stays together."""
    left = list(cards)
    hands = []
    while len(left) >= size:
        first = left.pop(0)
        near = [peer for peer in left if worst_link((first, peer)) is LinkKind.NVLINK]
        far = [peer for peer in left if peer not in near]
        hand = sorted([first, *(near + far)[: size - 1]], key=lambda card: card.index)
        left = [card for card in left if card not in hand]
        hands.append(tuple(hand))
    return hands


def _factors(size: int) -> list[tuple[int, int]]:
    return [(tensor, size // tensor) for tensor in range(size, 0, -1) if size % tensor == 0]


def senseless_exchange(shape: ModelShape, cards: Sequence[Card], degree: int) -> str | None:
    """Why cutting every layer over these cards is slower than it is worth; None where it is not."""
    group = cards[:degree]
    if degree < 2 or worst_link(group) is LinkKind.NVLINK:
        return None
    peaks = [card.fp16_flops_per_s for card in group if card.fp16_flops_per_s]
    if len(peaks) < degree:
        return None
    message_bytes = 2 * _PREFILL_TOKENS * shape.spec.hidden_size
    exchange_s = 2 * shape.spec.layers * all_reduce_s(group, message_bytes)
    shared_s = 2 * shape.decode_parameters * _PREFILL_TOKENS / (degree * min(peaks) * _PREFILL_ARITHMETIC)
    if exchange_s < _SENSELESS_EXCHANGE * shared_s:
        return None
    return (
        f"PCIe only: the all-reduce of a {_PREFILL_TOKENS}-token prefill over {degree} cards alone takes "
        f"{format_duration(exchange_s)}"
    )
