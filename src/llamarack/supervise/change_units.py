"""Replicas and steps as `rolling` decides about them, and steps in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarack.plan.record import CPU_INDEX
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.supervise.rolling import Await, Start, Step, Stop, Unit


def units_of(specs: Mapping[str, ReplicaSpec]) -> list[Unit]:
    return [unit_of(spec, is_ready=True) for spec in specs.values()]


def unit_of(spec: ReplicaSpec, *, is_ready: bool) -> Unit:
    """What it needs by the upper end of its plan, as at a start."""
    needs: dict[int, int] = {}
    mapped_bytes = 0
    for card in spec.candidate.cards:
        own = card.total_high_bytes
        if card.index == CPU_INDEX and spec.group.engine == "llamacpp":
            mapped_bytes = card.terms.weights_bytes
            own -= mapped_bytes
        needs[card.index] = needs.get(card.index, 0) + own
    if spec.candidate.host_bytes:
        needs[CPU_INDEX] = needs.get(CPU_INDEX, 0) + spec.candidate.host_bytes
    return Unit(
        id=spec.id,
        model=spec.model.name,
        needs_bytes=needs,
        mapped_path=str(spec.path) if mapped_bytes else None,
        mapped_bytes=mapped_bytes,
        is_ready=is_ready,
    )


def step_words(step: Step) -> str:
    match step:
        case Start():
            return f"start {step.replica}"
        case Await():
            return f"wait for {step.replica}"
        case Stop():
            room = f", to make room for {step.makes_room_for}" if step.makes_room_for else ""
            return f"end {step.replica} once its requests are finished{room}"


def in_words(steps: Sequence[Step]) -> list[str]:
    return [step_words(step) for step in steps]
