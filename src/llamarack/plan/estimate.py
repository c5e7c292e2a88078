"""One group on given cards: every replica planned in turn, speed predicted, one Candidate. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from llamarack.config import Group
from llamarack.hardware.machine import Card, Machine
from llamarack.plan import llamacpp_group
from llamarack.plan.calibration import Calibration, best_calibration
from llamarack.plan.cpu_speed import predict_cpu
from llamarack.plan.devices import claim, is_tight
from llamarack.plan.nodes import node_of
from llamarack.plan.record import Candidate, Load, Predicted
from llamarack.plan.replica import ReplicaPlan
from llamarack.plan.shape import ModelShape
from llamarack.plan.speed import Placed, calibrated, kv_element_bytes, predict, predict_closed_loop

Replicas = tuple[tuple[Card, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What stays the same while ways are compared. `claimed`: bytes others hold, by card index (-1: host)."""

    shape: ModelShape
    machine: Machine
    load: Load
    claimed: Mapping[int, int] = field(default_factory=dict)
    engine_version: str | None = None
    calibrations: tuple[Calibration, ...] = ()
    is_kv_shared: bool = False


def plan_replica(
    setting: Setting, group: Group, cards: tuple[Card, ...], held: Mapping[int, int], needed_sequences: int = 1
) -> ReplicaPlan:
    """`needed_sequences`: full-length sequences that a vLLM KV cache must hold; llama.cpp reserves all of its own."""
    arguments = (setting.shape, group, setting.machine, cards, held)
    if group.engine == "vllm":
        from llamarack.plan import vllm_group  # each engine's plan is imported where one is made

        return vllm_group.plan_replica(
            *arguments,
            setting.engine_version,
            needed_sequences=group.limits.sequences if setting.is_kv_shared else needed_sequences,
            is_kv_shared=setting.is_kv_shared,
        )
    if group.engine == "transformers":
        from llamarack.plan import torch_group

        return torch_group.plan_replica(*arguments)
    return llamacpp_group.plan_replica(*arguments, setting.engine_version)


def estimate(setting: Setting, group: Group, replicas: Replicas, *, needed_sequences: int = 1) -> Candidate:
    """Every replica in turn, each on what the ones before it left."""
    held = dict(setting.claimed)
    plans: list[ReplicaPlan] = []
    for cards in replicas:
        plan = plan_replica(setting, group, cards, held, needed_sequences)
        plans.append(plan)
        claim(held, plan.cards, plan.host_bytes)
    shown = min(plans, key=lambda plan: min(card.free_after_bytes for card in plan.cards))
    problems = tuple(dict.fromkeys(problem for plan in plans for problem in plan.problems))
    return _candidate(setting, group, replicas, plans, shown, problems)


def _candidate(
    setting: Setting,
    group: Group,
    replicas: Replicas,
    plans: list[ReplicaPlan],
    shown: ReplicaPlan,
    problems: tuple[str, ...],
) -> Candidate:
    fits = not problems
    limits = group.limits
    spec = setting.shape.spec
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
        context_tokens=limits.context_tokens,
        sequences=limits.sequences,
        batch_tokens=shown.batch_tokens,
        kv_dtype=shown.kv_dtype,
        threads=_threads(limits.threads, setting.machine, len(plans)),
        max_sequences=shown.max_sequences,
        max_context_tokens=shown.max_context_tokens,
        predicted=_speed(setting, group, replicas, plans, predict),
        closed_loop=_speed(setting, group, replicas, plans, predict_closed_loop),
        kv_cache_bytes=shown.kv_cache_bytes,
        gpu_memory_fraction=shown.gpu_memory_fraction,
        kv_unified=limits.kv_unified,
        gpu_layers=None if group.gpu_layers == "all" else group.gpu_layers,
        micro_batch_tokens=shown.micro_batch_tokens,
        model_path=str(spec.path),
        quantization=spec.quantization.label,
        host_bytes=shown.host_bytes,
        replica_plans=tuple(plan.cards for plan in plans),
        replica_splits=tuple(plan.tensor_split for plan in plans),
    )


def _threads(asked: int | Literal["auto"], machine: Machine, replicas: int) -> int:
    return max(1, machine.host.cores_usable // replicas) if asked == "auto" else asked


_Predict = Callable[[ModelShape, Placed, Load, float], Predicted]


def _speed(
    setting: Setting, group: Group, replicas: Replicas, plans: list[ReplicaPlan], predict_one: _Predict
) -> Predicted:
    """Of all replicas together: rates add up, times are the slowest replica's. With fewer sequences than replicas
    some stand idle.
    """
    unknown = Predicted(first_token_s=None, per_token_s=None, tokens_per_s=None)
    if any(not plan.is_legal for plan in plans):
        return unknown
    if not any(replicas):
        return _speed_on_host(setting, group, plans)
    if not all(replicas):
        return unknown
    if node_of(group).count > 1:  # the link between the machines is not known
        return unknown
    each: dict[tuple[object, ...], Predicted] = {}
    found = []
    for cards, plan in zip(replicas, plans, strict=True):
        key = (*(card.name for card in cards), *(card.terms.weights_bytes for card in plan.cards))
        if key not in each:
            placed = Placed(
                engine=group.engine,
                stages=_stages(setting.shape, group, cards, plan),
                batch_tokens=plan.micro_batch_tokens or plan.batch_tokens,
                kv_element_bytes=kv_element_bytes(group.engine, plan.kv_dtype),
                engine_version=setting.engine_version,
                card_shares=plan.tensor_split if group.split_mode == "tensor" else None,
                is_eager=_is_eager(group),
            )
            speed = predict_one(setting.shape, placed, setting.load, max(setting.load.concurrency / len(plans), 1.0))
            each[key] = calibrated(speed, _calibration(setting, group.engine, cards))
        found.append(each[key])
    busy = setting.load.concurrency / len(plans)
    rates = [one.tokens_per_s for one in found]
    firsts, steps = [one.first_token_s for one in found], [one.per_token_s for one in found]
    if None in rates or None in firsts or None in steps:
        return unknown
    return Predicted(
        first_token_s=max(value for value in firsts if value is not None),
        per_token_s=max(value for value in steps if value is not None),
        tokens_per_s=sum(value for value in rates if value is not None) * min(busy, 1.0),
    )


def _speed_on_host(setting: Setting, group: Group, plans: list[ReplicaPlan]) -> Predicted:
    """All replicas share the host's cores and memory."""
    if group.engine != "llamacpp":
        return Predicted(first_token_s=None, per_token_s=None, tokens_per_s=None)
    count = len(plans)
    bandwidth = setting.machine.host.memory_bandwidth_bytes_per_s
    one = predict_cpu(
        setting.shape,
        setting.load,
        max(setting.load.concurrency / count, 1.0),
        threads=_threads(group.limits.threads, setting.machine, count),
        bandwidth_bytes_per_s=None if bandwidth is None else bandwidth / count,
        kv_element_bytes=kv_element_bytes(group.engine, plans[0].kv_dtype),
    )
    if one.tokens_per_s is not None:
        one = replace(one, tokens_per_s=one.tokens_per_s * min(count, setting.load.concurrency))
    return calibrated(one, _calibration(setting, group.engine, ()))


def _calibration(setting: Setting, engine: str, cards: tuple[Card, ...]) -> Calibration | None:
    names = sorted({card.name for card in cards}) or [setting.machine.host.processor or "processor"]
    return best_calibration(
        setting.calibrations,
        card=" + ".join(names),
        engine=engine,
        engine_version=setting.engine_version,
        decode_bytes=setting.shape.decode_bytes,
    )


def _is_eager(group: Group) -> bool:
    if group.engine != "vllm":
        return False
    from llamarack.plan import vllm_group

    return vllm_group.is_eager(group)


def _stages(
    shape: ModelShape, group: Group, cards: tuple[Card, ...], plan: ReplicaPlan
) -> tuple[tuple[tuple[Card, ...], float], ...]:
    """Cards that share layers, and their part of all layers, in order."""
    if group.engine == "vllm":
        from llamarack.plan.vllm_shard import stage_layers

        degree = group.tensor_parallel
        spans = stage_layers(shape.spec.layers, group.pipeline_parallel)
        return tuple(
            (cards[stage * degree : (stage + 1) * degree], len(span) / shape.spec.layers)
            for stage, span in enumerate(spans)
        )
    if group.engine == "llamacpp" and group.split_mode == "layer" and len(cards) > 1:
        weights = [card.terms.weights_bytes for card in plan.cards]
        total = sum(weights)
        return tuple(((card,), weight / total) for card, weight in zip(cards, weights, strict=True) if weight)
    return ((cards, 1.0),)
