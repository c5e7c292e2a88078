"""One llama.cpp replica as a deployment file configures it: settings resolved, devices filled, bounds checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarack.config import Group, Limits
from llamarack.hardware.machine import Card, Host, Machine
from llamarack.model.spec import ModelFormat
from llamarack.plan import llamacpp
from llamarack.plan.devices import device_plan, free_bytes, shortage
from llamarack.plan.engine_data import (
    Band,
    ComputeLaw,
    build_number,
    context_band,
    data_file,
    llamacpp_law,
    llamacpp_unverified_bytes,
)
from llamarack.plan.llamacpp import DeviceLoad, Place, Settings
from llamarack.plan.llamacpp_pools import POOL_GROWTH_BYTES, pool_bytes
from llamarack.plan.record import Terms
from llamarack.plan.replica import ReplicaPlan
from llamarack.plan.shape import ModelShape
from llamarack.units import MIB, format_bytes

# The hungriest place: what each device keeps free of layers when they are dealt by free memory.
_IN_A_PIPELINE = Place(is_first=True, is_last=True, is_alone=False, is_pipelined=True)


def settings_of(shape: ModelShape, group: Group) -> Settings:
    """`auto` resolved. Raises ConfigError for a KV type llama.cpp cannot use with this model."""
    limits = group.limits
    batch, micro = batch_sizes(limits)
    return Settings(
        sequences=limits.sequences,
        context_tokens=limits.context_tokens,
        kv_dtype=llamacpp.check_kv_dtype(shape, limits.kv_dtype),
        kv_unified=limits.kv_unified,
        batch_tokens=batch,
        micro_batch_tokens=micro,
        split_mode=group.split_mode,
        gpu_layers=None if group.gpu_layers == "all" else group.gpu_layers,
    )


def batch_sizes(limits: Limits) -> tuple[int, int]:
    """`batch_tokens` as n_batch and n_ubatch: a number sets both, so that memory follows it."""
    if limits.batch_tokens == "auto":
        return llamacpp.BATCH_TOKENS, llamacpp.MICRO_BATCH_TOKENS
    return limits.batch_tokens, limits.batch_tokens


def plan_replica(
    shape: ModelShape,
    group: Group,
    machine: Machine,
    cards: Sequence[Card],
    claimed: Mapping[int, int],
    engine_version: str | None,
) -> ReplicaPlan:
    if group.rpc_servers and group.split_mode == "none":
        cards = cards[group.main_gpu : group.main_gpu + 1] or cards
    forbidden = _forbidden(shape, group, cards)
    if forbidden:
        return _refused(group.limits, cards or [machine.host], claimed, forbidden)
    settings = settings_of(shape, group)
    build = build_number(engine_version)
    if not cards:
        return _on_cpu(shape, settings, machine, claimed, build)
    return _on_cards(shape, group, settings, machine, cards, claimed, build)


def _on_cards(
    shape: ModelShape,
    group: Group,
    settings: Settings,
    machine: Machine,
    cards: Sequence[Card],
    claimed: Mapping[int, int],
    build: int | None,
) -> ReplicaPlan:
    laws = [llamacpp_law(_backend(card), build) for card in cards]
    contexts = [
        context_band(
            "llamacpp.yaml", law.backend, card=card.name, driver=machine.driver_version, build=build or law.build
        )
        for card, law in zip(cards, laws, strict=True)
    ]
    pools = pool_bytes(shape, settings)
    contexts = [
        context.plus(pools, POOL_GROWTH_BYTES) if law.backend == "cuda" else context
        for context, law in zip(contexts, laws, strict=True)
    ]
    shares, share_problem = _shares(shape, group, settings, laws, contexts, cards, claimed)
    problems = [share_problem] if share_problem else []
    shares = [round(share, 4) for share in shares]  # as it will be written
    loads, host_bytes = llamacpp.on_cards(shape, settings, laws, shares)
    exchange = [_exchange_bytes(settings, law, len(cards)) for law in laws]
    planned = tuple(
        device_plan(card, _terms(load, context, shared), _high(load, context, law) + shared, claimed)
        for card, load, context, law, shared in zip(cards, loads, contexts, laws, exchange, strict=True)
    )
    # Processors of this very computer behind RPC servers take of one memory, each as if it were alone.
    on_host = sum(plan.total_high_bytes for card, plan in zip(cards, planned, strict=True) if card.is_host_memory)
    problems += [
        problem
        for problem in (_host_shortage(machine, host_bytes + on_host, claimed), *map(shortage, planned))
        if problem
    ]
    return ReplicaPlan(
        cards=planned,
        problems=tuple(problems),
        notes=_notes(shape, group, cards, laws, contexts),
        kv_dtype=settings.kv_dtype,
        batch_tokens=settings.batch_tokens,
        micro_batch_tokens=settings.micro_batch_tokens,
        tensor_split=tuple(shares) if len(cards) > 1 else None,
        host_bytes=host_bytes,
    )


def _exchange_bytes(settings: Settings, law: ComputeLaw, cards: int) -> int:
    """What a card holds to sum the parts of every layer with the others."""
    if settings.split_mode != "tensor" or cards < 2 or law.backend != "cuda":
        return 0
    mib: int = data_file("llamacpp.yaml")["tensor_exchange_mib"]
    return mib * MIB


def _backend(card: Card) -> str:
    return "rpc" if card.rpc_server is not None else "cuda"


def _host_shortage(machine: Machine, host_bytes: int, claimed: Mapping[int, int]) -> str | None:
    free = free_bytes(machine.host, claimed)
    if host_bytes <= free:
        return None
    return f"the host's memory has to take {format_bytes(host_bytes)}, {format_bytes(free)} are available"


def _on_cpu(
    shape: ModelShape,
    settings: Settings,
    machine: Machine,
    claimed: Mapping[int, int],
    build: int | None,
) -> ReplicaPlan:
    law = llamacpp_law("cpu", build)
    context = context_band("llamacpp.yaml", "cpu", card=None, driver=None, build=law.build)
    load = llamacpp.on_cpu(shape, settings, law)
    planned = device_plan(machine.host, _terms(load, context), _high(load, context, law), claimed)
    short = shortage(planned)
    return ReplicaPlan(
        cards=(planned,),
        problems=(short,) if short else (),
        notes=_unverified(law),
        kv_dtype=settings.kv_dtype,
        batch_tokens=settings.batch_tokens,
        micro_batch_tokens=settings.micro_batch_tokens,
    )


def _refused(
    limits: Limits, devices: Sequence[Card | Host], claimed: Mapping[int, int], problems: list[str]
) -> ReplicaPlan:
    batch, micro = batch_sizes(limits)
    return ReplicaPlan(
        cards=tuple(device_plan(device, Terms(), 0, claimed) for device in devices),
        problems=tuple(problems),
        kv_dtype=limits.kv_dtype,
        batch_tokens=batch,
        micro_batch_tokens=micro,
        is_legal=False,
    )


def _terms(load: DeviceLoad, context: Band, exchange_bytes: int = 0) -> Terms:
    return Terms(
        weights_bytes=load.weights_bytes,
        kv_bytes=load.kv_bytes,
        compute_bytes=load.compute_bytes,
        communication_bytes=exchange_bytes,
        context_bytes=context.typical_bytes,
    )


def _high(load: DeviceLoad, context: Band, law: ComputeLaw) -> int:
    extra = 0 if law.verified else llamacpp_unverified_bytes(load.compute_high_bytes)
    return load.weights_bytes + load.kv_bytes + load.compute_high_bytes + extra + context.high_bytes


def _shares(
    shape: ModelShape,
    group: Group,
    settings: Settings,
    laws: Sequence[ComputeLaw],
    contexts: Sequence[Band],
    cards: Sequence[Card],
    claimed: Mapping[int, int],
) -> tuple[list[float], str | None]:
    """Share of the model per card, summing to 1. `auto`: equal in tensor mode, else by what is free for layers."""
    if isinstance(group.tensor_split, list) and not (len(cards) == 1 and settings.split_mode == "none"):
        given = group.tensor_split
        total = sum(given)
        if len(given) == len(cards) and total:
            return [share / total for share in given], None
        remote = sum(card.rpc_server is not None for card in cards)
        wanted = f"{remote} RPC devices and {len(cards) - remote} cards" if remote else f"{len(cards)} cards"
        return [1 / len(cards)] * len(cards), f"tensor_split has {len(given)} shares for {wanted}"
    if len(cards) == 1 or settings.split_mode == "tensor":
        return [1 / len(cards)] * len(cards), None
    spare = [
        max(
            free_bytes(card, claimed)
            - llamacpp.high_compute_bytes(shape, settings, law, _IN_A_PIPELINE)
            - context.high_bytes,
            0,
        )
        for card, context, law in zip(cards, contexts, laws, strict=True)
    ]
    total_spare = sum(spare)
    return [part / total_spare for part in spare] if total_spare else [1 / len(cards)] * len(cards), None


def _forbidden(shape: ModelShape, group: Group, cards: Sequence[Card]) -> list[str]:
    reasons = []
    if shape.spec.format is not ModelFormat.GGUF:
        reasons.append("llamacpp reads GGUF files; this model is safetensors")
    if len(cards) > 1 and any(card.mig_parent_uuid for card in cards):
        reasons.append("a process sees one MIG slice only: slices cannot share a replica")
    if len(cards) > 1 and group.split_mode == "none":
        beyond = f", main_gpu is {group.main_gpu}" if group.rpc_servers else ""
        reasons.append(f"split_mode none uses one card, {len(cards)} are given{beyond}")
    return reasons


def _notes(
    shape: ModelShape, group: Group, cards: Sequence[Card], laws: Sequence[ComputeLaw], contexts: Sequence[Band]
) -> tuple[str, ...]:
    notes = list(dict.fromkeys(note for law in laws for note in _unverified(law)))
    if group.rpc_servers:
        notes.append("RPC servers take orders from whoever reaches their port: keep it to this network")
    busy = [card.rpc_server for card in cards if card.is_rpc_busy]
    if busy:
        notes.append(f"{', '.join(map(str, dict.fromkeys(busy)))}: busy with another client, memory as told before")
    if group.split_mode == "tensor" and len(contexts) > 1:
        notes.append("split_mode tensor is experimental in llama.cpp: measure it against layer before relying on it")
    if not all(context.measured for context in contexts):
        notes.append("the context constant of this card, driver and build was not measured: a band is used")
    if group.gpu_layers != "all" and group.gpu_layers <= shape.spec.layers:
        notes.append(
            f"{shape.spec.layers + 1 - group.gpu_layers} of {shape.spec.layers + 1} layers stay on the CPU: "
            "every token waits for them"
        )
    return tuple(notes)


def _unverified(law: ComputeLaw) -> tuple[str, ...]:
    if law.verified:
        return ()
    return (f"this llama.cpp build is unverified: the law of b{law.build} ({law.backend}) with a wider band",)
