"""A supervisor that returns plans as if its own engines were gone."""

from dataclasses import replace

from llamarack.hardware.machine import Card, CardProcess, Host, Machine
from llamarack.supervise.own_memory import without_engines

GIB = 1024**3
HOST = Host(
    processor=None,
    cores_usable=8,
    instruction_sets=(),
    memory_total_bytes=64 * GIB,
    memory_available_bytes=10 * GIB,
)
CARD = Card(
    index=0,
    uuid="GPU-a",
    vendor="nvidia",
    name="A",
    memory_total_bytes=80 * GIB,
    memory_free_bytes=5 * GIB,
    processes=(CardProcess(pid=10, memory_bytes=60 * GIB), CardProcess(pid=20, memory_bytes=14 * GIB)),
)
MACHINE = Machine(host=HOST, cards=(CARD,))


def test_memory_of_own_engines_counts_as_free_and_that_of_others_does_not() -> None:
    seen = without_engines(MACHINE, {10: 3 * GIB})
    assert seen.cards[0].memory_free_bytes == 65 * GIB
    assert [each.pid for each in seen.cards[0].processes] == [20]
    assert seen.host.memory_available_bytes == 13 * GIB


def test_free_memory_never_exceeds_the_total() -> None:
    crowded = replace(CARD, memory_free_bytes=79 * GIB)
    seen = without_engines(replace(MACHINE, cards=(crowded,)), {10: 60 * GIB})
    assert seen.cards[0].memory_free_bytes == 80 * GIB
    assert seen.host.memory_available_bytes == 64 * GIB


def test_unknown_free_memory_stays_unknown() -> None:
    seen = without_engines(replace(MACHINE, cards=(replace(CARD, memory_free_bytes=None),)), {10: GIB})
    assert seen.cards[0].memory_free_bytes is None


def test_machine_without_own_engines_is_the_machine() -> None:
    assert without_engines(MACHINE, {}) is MACHINE
