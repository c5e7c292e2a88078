"""The machine as it would be without this rack's own engines: a supervisor that returns must not count the memory of
engines that it is about to take back as somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llamarack.hardware.machine import Card, Machine
from llamarack.supervise.keeping import keeper_mark, processes_marked
from llamarack.supervise.memory_file import Memory


def living_engines(memory: Memory | None) -> dict[int, int]:
    """Private memory in bytes of every engine process that an earlier supervisor left running, by pid."""
    found: dict[int, int] = {}
    for saved in memory.replicas if memory else ():
        found |= engine_memory(saved.memory.control_socket)
    return found


def engine_memory(control_socket: Path) -> dict[int, int]:
    """The same of one keeper's engine."""
    import psutil  # a first start has none

    found: dict[int, int] = {}
    for pid in processes_marked(keeper_mark(control_socket)):
        try:
            usage = psutil.Process(pid).memory_info()
        except psutil.Error:
            continue
        found[pid] = usage.rss - usage.shared  # mapped weights are page cache, which counts as available
    return found


def without_engines(machine: Machine, engines: Mapping[int, int]) -> Machine:
    """The same machine with the memory of `engines` (host bytes by pid) free again. Does not change `machine`."""
    if not engines:
        return machine
    host = machine.host
    available = min(host.memory_total_bytes, host.memory_available_bytes + sum(engines.values()))
    return replace(
        machine,
        host=replace(host, memory_available_bytes=available),
        cards=tuple(_card_without(card, engines) for card in machine.cards),
    )


def _card_without(card: Card, engines: Mapping[int, int]) -> Card:
    ours = sum(each.memory_bytes or 0 for each in card.processes if each.pid in engines)
    if card.memory_free_bytes is None or not ours:
        return card
    return replace(
        card,
        memory_free_bytes=min(card.memory_total_bytes, card.memory_free_bytes + ours),
        processes=tuple(each for each in card.processes if each.pid not in engines),
    )
