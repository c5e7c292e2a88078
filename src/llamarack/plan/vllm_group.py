"""One vLLM replica as a deployment file configures it: ranks on cards, KV from the budget, bounds checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

from llamarack.config import Group
from llamarack.hardware.machine import Card, Host, Machine
from llamarack.plan import vllm
from llamarack.plan.devices import device_plan, free_bytes, shortage
from llamarack.plan.engine_data import Band, context_band
from llamarack.plan.nodes import Node, engine_flags, node_of
from llamarack.plan.record import CardPlan, Terms
from llamarack.plan.replica import ReplicaPlan
from llamarack.plan.shape import ModelShape
from llamarack.plan.vllm import Constants, RankLoad, Settings
from llamarack.plan.vllm_shard import illegal_cut
from llamarack.units import GIB, format_bytes

_COMPUTE_CAPABILITY = (7, 0)  # docs of vLLM 0.33: compute capability 7.0 or higher


def plan_replica(
    shape: ModelShape,
    group: Group,
    machine: Machine,
    cards: Sequence[Card],
    claimed: Mapping[int, int],
    engine_version: str | None,
    *,
    needed_sequences: int,
    is_kv_shared: bool = False,
) -> ReplicaPlan:
    """`needed_sequences`: how many full-length sequences the KV cache must hold at once.

    `is_kv_shared`: give it just that, and leave the rest of the fraction to others.
    """
    forbidden = _forbidden(shape, group, cards)
    if forbidden:
        return _refused(group, machine, cards, claimed, forbidden)
    constants = vllm.constants_of(engine_version)
    settings = settings_of(group, cards)
    node = node_of(group)
    devices: Sequence[Card | Host] = cards or [machine.host] * len(node.ranks)
    if not cards:
        needed_sequences = max(needed_sequences, settings.sequences)  # no fraction fills up what is left of a host
    loads = [_ranks(shape, settings, constants)[rank] for rank in node.ranks]
    contexts = [_context(device, machine, constants) for device in devices]
    needed = needed_sequences * vllm.blocks_needed(settings.context_tokens)
    fraction = _fraction(group, devices, contexts, claimed)
    blocks, kv_problem = _blocks(group, settings, loads, devices, fraction, needed)
    if is_kv_shared and group.limits.kv_cache_bytes == "auto":
        blocks = min(blocks, needed)
    planned = _planned(devices, loads, contexts, blocks, claimed, constants)
    page = max(load.page_bytes for load in loads)
    return ReplicaPlan(
        cards=planned,
        problems=tuple(problem for problem in (kv_problem, *map(shortage, planned)) if problem),
        notes=_notes(settings, constants, contexts, loads, planned, blocks) + _node_notes(node),
        kv_dtype=settings.kv_dtype,
        batch_tokens=settings.batch_tokens,
        kv_cache_bytes=blocks * page,
        gpu_memory_fraction=fraction if cards else None,
        is_kv_scarce=not is_kv_shared and (blocks - needed) * page < GIB,
        max_sequences=blocks // vllm.blocks_needed(settings.context_tokens),
        max_context_tokens=blocks // needed_sequences * vllm.BLOCK_TOKENS,
    )


def settings_of(group: Group, cards: Sequence[Card]) -> Settings:
    """`auto` resolved. Raises ConfigError for a KV type vLLM does not have."""
    limits = group.limits
    return Settings(
        sequences=limits.sequences,
        context_tokens=limits.context_tokens,
        kv_dtype=vllm.check_kv_dtype(limits.kv_dtype),
        batch_tokens=_batch_tokens(group, cards),
        tensor_parallel=group.tensor_parallel,
        pipeline_parallel=group.pipeline_parallel,
        is_eager=is_eager(group),
    )


def is_eager(group: Group) -> bool:
    """Whether vLLM launches every kernel from the host, without CUDA graphs."""
    return group.engine == "vllm" and engine_flags(group).get("enforce-eager", False) not in (False, None, "false")


def _batch_tokens(group: Group, cards: Sequence[Card]) -> int:
    if group.limits.batch_tokens != "auto":
        return group.limits.batch_tokens
    if cards:
        return vllm.default_batch_tokens(cards[0].name, cards[0].memory_total_bytes)
    return 2048


def _ranks(shape: ModelShape, settings: Settings, constants: Constants) -> list[RankLoad]:
    """In vLLM's order: the ranks of a stage are neighbours."""
    stages = vllm.rank_loads(shape, settings, constants)
    return [stage for stage in stages for _ in range(settings.tensor_parallel)]


def _blocks(
    group: Group,
    settings: Settings,
    loads: Sequence[RankLoad],
    devices: Sequence[Card | Host],
    fraction: float,
    needed: int,
) -> tuple[int, str | None]:
    """KV blocks of every rank, and why they are too few; without cards what all sequences need, as there is no budget
    to share out."""
    limits = group.limits
    if limits.kv_cache_bytes != "auto":
        blocks = min(limits.kv_cache_bytes // load.page_bytes for load in loads)
        source = f"kv_cache_bytes {format_bytes(limits.kv_cache_bytes)}"
    elif isinstance(devices[0], Host):
        return vllm.cpu_blocks(settings.sequences, settings.context_tokens), None
    else:
        totals = [device.memory_total_bytes for device in devices]
        blocks = vllm.budget_blocks(loads, totals, fraction)
        source = f"gpu_memory_fraction {fraction:g}"
    if blocks >= needed:
        return blocks, None
    page = max(load.page_bytes for load in loads)
    if not blocks:
        weights = format_bytes(max(load.weights_bytes for load in loads))
        return 0, f"{source} leaves nothing for KV beside {weights} of weights per card"
    return blocks, (
        f"{source} leaves {format_bytes(blocks * page)} for KV per card, "
        f"{needed // vllm.blocks_needed(settings.context_tokens)} sequences of {settings.context_tokens} tokens need "
        f"{format_bytes(needed * page)}"
    )


def _fraction(
    group: Group, devices: Sequence[Card | Host], contexts: Sequence[Band], claimed: Mapping[int, int]
) -> float:
    """The configured fraction, or less where others hold a part of a card: vLLM will not start on less free memory."""
    fraction = group.limits.gpu_memory_fraction
    for device, context in zip(devices, contexts, strict=True):
        if isinstance(device, Card):
            free = free_bytes(device, claimed) - context.high_bytes
            fraction = min(fraction, free / vllm.cuda_total_bytes(device.memory_total_bytes))
    return max(floor(fraction * 100 + 1e-9) / 100, 0.0)


def _planned(
    devices: Sequence[Card | Host],
    loads: Sequence[RankLoad],
    contexts: Sequence[Band],
    blocks: int,
    claimed: Mapping[int, int],
    constants: Constants,
) -> tuple[CardPlan, ...]:
    planned = []
    for device, load, context in zip(devices, loads, contexts, strict=True):
        terms = Terms(
            weights_bytes=load.weights_bytes,
            kv_bytes=blocks * load.page_bytes,
            compute_bytes=load.compute_bytes,
            graphs_bytes=load.graphs_bytes,
            sampler_bytes=load.sampler_bytes,
            communication_bytes=load.communication_bytes,
            context_bytes=context.typical_bytes,
        )
        high = terms.total_bytes - load.compute_bytes + load.compute_high_bytes
        high += context.high_bytes - context.typical_bytes + (0 if constants.verified else load.graphs_bytes)
        high += load.communication_bytes // 4  # a rank of two on H200 cards was 37 MiB above the end without it
        planned.append(device_plan(device, terms, high, claimed))
    return tuple(planned)


def _context(device: Card | Host, machine: Machine, constants: Constants) -> Band:
    if isinstance(device, Host):
        return context_band("vllm.yaml", "cpu", card=None, driver=None, build=None)
    return context_band("vllm.yaml", "cuda", card=device.name, driver=machine.driver_version, build=constants.version)


def _node_notes(node: Node) -> tuple[str, ...]:
    if node.count == 1:
        return ()
    first, last = node.ranks[0], node.ranks[-1]
    here = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return (
        f"{here} of {node.world} run on this machine; the other nodes are started by hand, and the poorest card of all "
        "nodes sets the KV cache",
    )


def _forbidden(shape: ModelShape, group: Group, cards: Sequence[Card]) -> tuple[str, ...]:
    reasons = illegal_cut(shape.spec, group.tensor_parallel, group.pipeline_parallel)
    node = node_of(group)
    if cards and len(cards) != len(node.ranks):
        here = f", {len(node.ranks)} of them on each of {node.count} nodes" if node.count > 1 else ""
        reasons.append(f"tensor_parallel x pipeline_parallel is {node.world}{here}, {len(cards)} cards are given")
    if node.world > 1 and any(card.mig_parent_uuid for card in cards):
        reasons.append("MIG slices cannot reach each other: a slice never shares a group")
    for card in cards:
        if card.compute_capability is not None and card.compute_capability < _COMPUTE_CAPABILITY:
            major, minor = card.compute_capability
            reasons.append(f"vllm needs compute capability 7.0, card {card.index} ({card.name}) has {major}.{minor}")
    return tuple(dict.fromkeys(reasons))


def _refused(
    group: Group,
    machine: Machine,
    cards: Sequence[Card],
    claimed: Mapping[int, int],
    problems: tuple[str, ...],
) -> ReplicaPlan:
    devices: Sequence[Card | Host] = cards or [machine.host]
    return ReplicaPlan(
        cards=tuple(device_plan(device, Terms(), 0, claimed) for device in devices),
        problems=problems,
        kv_dtype=group.limits.kv_dtype,
        batch_tokens=_batch_tokens(group, cards),
        is_legal=False,
    )


def _notes(
    settings: Settings,
    constants: Constants,
    contexts: Sequence[Band],
    loads: Sequence[RankLoad],
    planned: Sequence[CardPlan],
    blocks: int,
) -> tuple[str, ...]:
    tokens = vllm.kv_tokens(blocks, settings.context_tokens)
    notes = [f"the KV cache holds {tokens:,} tokens ({tokens / settings.context_tokens:.1f} full-length sequences)"]
    if not constants.verified:
        notes.append(f"this vllm version is unverified: the constants of {constants.version} with a wider band")
    if not all(context.measured for context in contexts):
        notes.append("the context constant of this card, driver and version was not measured: a band is used")
    spare = [card.free_after_bytes for card in planned]
    if len(spare) > 1 and max(spare) - min(spare) > GIB:
        wasted = format_bytes(max(spare) - min(spare))
        notes.append(f"the poorest card sets the KV cache of all: {wasted} of the richest stay unused")
    return tuple(notes)
