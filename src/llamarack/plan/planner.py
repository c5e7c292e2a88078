"""What a configured group will need on this machine, and which ways of running a model there are. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from llamarack.config import Group
from llamarack.hardware.machine import Card, Machine
from llamarack.model.spec import ModelSpec
from llamarack.plan import llamacpp_group, vllm_group
from llamarack.plan.devices import claim, free_bytes, is_tight, replica_cards
from llamarack.plan.record import Candidate, Predicted
from llamarack.plan.replica import ReplicaPlan
from llamarack.plan.shape import ModelShape, shape_of

UNKNOWN_SPEED = Predicted(first_token_s=None, per_token_s=None, tokens_per_s=None)
Replicas = tuple[tuple[Card, ...], ...]


def plan_group(
    spec: ModelSpec,
    group: Group,
    machine: Machine,
    *,
    model_name: str,
    replica_count: int | None = None,
    engine_version: str | None = None,
    claimed_bytes: Mapping[int, int] | None = None,
) -> Candidate:
    """What one group needs as configured; `fits` and `reasons` say whether this machine has it.

    `replica_count` overrides the group's; `claimed_bytes`: what other groups hold, by card index (-1: host).
    Raises ConfigError for settings that contradict each other, HardwareError for a card that is not there.
    """
    shape = shape_of(spec)
    claimed = claimed_bytes or {}
    count = group.replicas if replica_count is None else replica_count
    lists = group.gpu_lists()
    if lists is not None:
        return estimate(shape, group, machine, replica_cards(machine, lists[:count]), engine_version, claimed)
    tried = None
    for replicas in _auto_cards(group, machine, count, claimed):
        tried = estimate(shape, group, machine, replicas, engine_version, claimed)
        if tried.fits:
            break
    assert tried is not None  # `_auto_cards` yields at least one
    return tried


def estimate(
    shape: ModelShape,
    group: Group,
    machine: Machine,
    replicas: Replicas,
    engine_version: str | None,
    claimed: Mapping[int, int],
    *,
    needed_sequences: int = 1,
) -> Candidate:
    """Every replica in turn, each on what the ones before it left.

    `needed_sequences`: full-length sequences that a vLLM replica's KV cache must hold; llama.cpp reserves all of its.
    """
    held = dict(claimed)
    plans: list[ReplicaPlan] = []
    for cards in replicas:
        plan = _replica(shape, group, machine, cards, held, engine_version, needed_sequences)
        plans.append(plan)
        claim(held, plan.cards)
    shown = min(plans, key=lambda plan: min(card.free_after_bytes for card in plan.cards))
    problems = tuple(dict.fromkeys(problem for plan in plans for problem in plan.problems))
    return _candidate(group, machine, replicas, plans, shown, problems)


def _replica(
    shape: ModelShape,
    group: Group,
    machine: Machine,
    cards: tuple[Card, ...],
    held: Mapping[int, int],
    engine_version: str | None,
    needed_sequences: int,
) -> ReplicaPlan:
    if group.engine == "vllm":
        return vllm_group.plan_replica(
            shape, group, machine, cards, held, engine_version, needed_sequences=needed_sequences
        )
    return llamacpp_group.plan_replica(shape, group, machine, cards, held, engine_version)


def _candidate(
    group: Group,
    machine: Machine,
    replicas: Replicas,
    plans: list[ReplicaPlan],
    shown: ReplicaPlan,
    problems: tuple[str, ...],
) -> Candidate:
    fits = not problems
    asked = group.limits.threads
    threads = max(1, machine.host.cores_usable // max(len(plans), 1)) if asked == "auto" else asked
    return Candidate(
        engine=group.engine,
        replicas=len(plans),
        tensor_parallel=group.tensor_parallel,
        pipeline_parallel=group.pipeline_parallel,
        split_mode=group.split_mode if group.engine == "llamacpp" else None,
        tensor_split=shown.tensor_split,
        fits=fits,
        tight=fits and (shown.is_kv_scarce or is_tight(card for plan in plans for card in plan.cards)),
        reasons=problems or shown.notes,
        cards=shown.cards,
        replica_cards=tuple(tuple(card.index for card in cards) for cards in replicas),
        context_tokens=group.limits.context_tokens,
        sequences=group.limits.sequences,
        batch_tokens=shown.batch_tokens,
        kv_dtype=shown.kv_dtype,
        threads=threads,
        max_sequences=None,
        max_context_tokens=None,
        predicted=UNKNOWN_SPEED,
        kv_cache_bytes=shown.kv_cache_bytes,
        gpu_memory_fraction=group.limits.gpu_memory_fraction if group.engine == "vllm" else None,
        kv_unified=group.limits.kv_unified,
        micro_batch_tokens=shown.micro_batch_tokens,
        host_bytes=shown.host_bytes,
        replica_plans=tuple(plan.cards for plan in plans),
    )


def _auto_cards(group: Group, machine: Machine, count: int, claimed: Mapping[int, int]) -> list[Replicas]:
    """Ways to give `count` replicas cards, fewest cards per replica first; the CPU where there are none."""
    if not machine.cards:
        return [((),) * count]
    alike: dict[str, int] = {}
    for card in machine.cards:
        alike[card.name] = alike.get(card.name, 0) + 1
    ranked = sorted(machine.cards, key=lambda card: (-alike[card.name], -free_bytes(card, claimed), card.index))
    if group.engine == "llamacpp":
        ranked = sorted(machine.cards, key=lambda card: (-free_bytes(card, claimed), card.index))
        sizes = [1] if group.split_mode == "none" else list(range(1, len(ranked) + 1))
    else:
        sizes = [group.tensor_parallel * group.pipeline_parallel]
    ways = [_dealt(ranked, size, count) for size in sizes if size * count <= len(ranked)]
    return ways or [_dealt(ranked, min(sizes[0], len(ranked)), count)]


def _dealt(ranked: list[Card], size: int, count: int) -> Replicas:
    """Replica r takes the next `size` cards, starting over when they run out."""
    hands = [[ranked[(replica * size + slot) % len(ranked)] for slot in range(size)] for replica in range(count)]
    return tuple(tuple(sorted(hand, key=lambda card: card.index)) for hand in hands)
