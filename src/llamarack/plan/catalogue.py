"""Cards by name: `RTX 4090 x2 + A100-80 x1` as a machine that is not here. Pure."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache

from llamarack.errors import UsageError
from llamarack.hardware.machine import Card, Host, Link, LinkKind, Machine
from llamarack.plan.engine_data import data_file
from llamarack.units import GIB, MIB

_COUNTED = (
    re.compile(r"^(?P<name>.+?)\s*[x×*]\s*(?P<count>\d{1,9})$", re.IGNORECASE),
    re.compile(r"^(?P<count>\d{1,9})\s*[x×*]\s*(?P<name>.+)$", re.IGNORECASE),
)
_LEAST_END = 4  # characters of a name's end that stand for it: `4090`
MOST_CARDS = 64
# A machine that only its cards are known of gets a host that is no bottleneck for memory: twice the cards' memory.
_HOST_MEMORY_FACTOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueCard:
    """A card as its data sheet has it."""

    name: str
    aliases: tuple[str, ...]
    memory_total_bytes: int
    memory_usable_bytes: int | None
    memory_bandwidth_bytes_per_s: float
    fp16_flops_per_s: float
    compute_capability: tuple[int, int]
    link: LinkKind
    source: str


@cache
def catalogue() -> tuple[CatalogueCard, ...]:
    return tuple(
        CatalogueCard(
            name=row["name"],
            aliases=tuple(row["aliases"]),
            memory_total_bytes=row["memory_mib"] * MIB,
            memory_usable_bytes=row["usable_mib"] * MIB if "usable_mib" in row else None,
            memory_bandwidth_bytes_per_s=row["bandwidth_gb_s"] * 1e9,
            fp16_flops_per_s=row["fp16_tflops"] * 1e12,
            compute_capability=(row["capability"][0], row["capability"][1]),
            link=LinkKind(row["link"]),
            source=row["source"],
        )
        for row in data_file("cards.yaml")
    )


def find_card(name: str) -> CatalogueCard | None:
    """By driver name or alias, whatever the case, spaces and maker's words."""
    return _by_key().get(_key(name))


def _typed_card(name: str) -> CatalogueCard | None:
    """As people type it: an end that only one card has will do."""
    key, known = _key(name), _by_key()
    if key in known or len(key) < _LEAST_END:
        return known.get(key)
    ends = {known[one].name: known[one] for one in known if one.endswith(key)}
    return next(iter(ends.values())) if len(ends) == 1 else None


@cache
def _by_key() -> dict[str, CatalogueCard]:
    return {_key(name): card for card in catalogue() for name in (card.name, *card.aliases)}


def _key(name: str) -> str:
    words = re.sub(r"nvidia|geforce|tesla|gb\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)


def machine_of(text: str) -> Machine:
    """`RTX 3090 x2 + A100-80 x1`. Raises UsageError for a name that is not in the catalogue, with the nearest."""
    counted = [_counted(item.strip(), text) for item in re.split(r"[+,]", text)]
    total = sum(count for _, count in counted)
    if total > MOST_CARDS:
        raise UsageError(
            f"`--gpus`: at most {MOST_CARDS} cards, {total} given", hint="one rack stands on one server: name its cards"
        )
    kinds = [kind for kind, count in counted for _ in range(count)]
    same = len({kind.name for kind in kinds}) == 1
    link = kinds[0].link if same else LinkKind.PCIE_HOST
    cards = tuple(_card(index, kind, len(kinds), link) for index, kind in enumerate(kinds))
    memory = max(64 * GIB, _HOST_MEMORY_FACTOR * sum(kind.memory_total_bytes for kind in kinds))
    host = Host(
        processor=None,
        cores_usable=8 * len(kinds),
        instruction_sets=(),
        memory_total_bytes=memory,
        memory_available_bytes=memory,
    )
    return Machine(host=host, cards=cards)


def _counted(item: str, text: str) -> tuple[CatalogueCard, int]:
    if not item:
        raise UsageError(f"`--gpus`: `{text}` has an empty item", hint='--gpus "RTX 4090 x2 + A100-80 x1"')
    # `RTX 4090` ends like a count, `4090 x2` begins like one.
    matches = [match for form in _COUNTED if (match := form.match(item))]
    readings = [(item, 1), *((match["name"], int(match["count"])) for match in matches)]
    card, count = next(((card, count) for name, count in readings if (card := _typed_card(name))), (None, 0))
    if card is None:
        raise _unknown_card(readings[min(1, len(matches))][0])
    if count < 1:
        raise UsageError(f"`--gpus`: at least 1 of `{card.aliases[0]}`, {count} given")
    return card, count


def _unknown_card(name: str) -> UsageError:
    known = {alias: kind for kind in catalogue() for alias in (kind.aliases[0], kind.name)}
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = "did you mean " + " or ".join(f"`{one}`" for one in near) + "?" if near else None
    names = ", ".join(kind.aliases[0] for kind in catalogue())
    return UsageError(f"`--gpus`: no card `{name}` in the catalogue", hint=hint or f"known: {names}")


def _card(index: int, kind: CatalogueCard, count: int, link: LinkKind) -> Card:
    peers = (peer for peer in range(count) if peer != index)
    return Card(
        index=index,
        uuid=None,
        vendor="nvidia",
        name=kind.name,
        memory_total_bytes=kind.memory_total_bytes,
        memory_free_bytes=kind.memory_usable_bytes,
        compute_capability=kind.compute_capability,
        links=tuple(Link(peer_index=peer, kind=link) for peer in peers),
        memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s,
        fp16_flops_per_s=kind.fp16_flops_per_s,
    )
