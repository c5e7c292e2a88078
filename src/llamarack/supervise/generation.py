"""Names over a change: a replica's place in the layout stays, its generation is part of its id. Pure.

`llama-0` and, when a change replaced it as the third, `llama-0-g3`: both may run side by side, with sockets and logs of
their own. A place ends in a number, so that the two parts cannot be mistaken.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamarack.supervise.replica_record import ReplicaSpec

_GENERATION = re.compile(r"-g(\d+)$")


def generation_of(replica: str) -> int:
    found = _GENERATION.search(replica)
    return int(found[1]) if found else 1


def place_of(replica: str) -> str:
    return _GENERATION.sub("", replica)


def named(place: str, generation: int) -> str:
    return place if generation == 1 else f"{place}-g{generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A replica that runs."""

    id: str
    fingerprint: str
    is_ready: bool = True


def matched(present: Sequence[Present], specs: Sequence[ReplicaSpec], generation: int) -> list[ReplicaSpec]:
    """The layout `specs` with its final ids: that of a present replica which is what a spec asks for, else a new one.

    Of several that are alike the one in the same place is taken, then a ready one.
    """
    free = list(present)
    ids: dict[int, str] = {}
    for same_place in (True, False):
        for index, spec in enumerate(specs):
            alike = [
                each
                for each in free
                if each.fingerprint == spec.fingerprint and (not same_place or place_of(each.id) == place_of(spec.id))
            ]
            if index in ids or not alike:
                continue
            taken = max(alike, key=lambda each: each.is_ready)
            ids[index] = taken.id
            free.remove(taken)
    used = {each.id for each in present}
    for index, spec in enumerate(specs):
        if index not in ids:
            number = generation
            while named(place_of(spec.id), number) in used:
                number += 1
            ids[index] = named(place_of(spec.id), number)
            used.add(ids[index])
    return [replace(spec, id=ids[index]) for index, spec in enumerate(specs)]
