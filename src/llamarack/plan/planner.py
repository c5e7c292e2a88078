"""What a configured group will need on this machine, and which ways of running a model there are, ranked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llamarack.config import Group, Limits
from llamarack.hardware.machine import Card, Machine
from llamarack.model.spec import ModelSpec
from llamarack.plan.calibration import Calibration
from llamarack.plan.devices import free_bytes, remote_cards, replica_cards
from llamarack.plan.estimate import Setting, estimate
from llamarack.plan.limits import with_limits
from llamarack.plan.nodes import node_of
from llamarack.plan.ranking import Goal, Question, ranked_candidates
from llamarack.plan.record import Candidate, Load, Plan
from llamarack.plan.remarks import remarks
from llamarack.plan.shape import shape_of


def plan_group(
    spec: ModelSpec,
    group: Group,
    machine: Machine,
    *,
    model_name: str,
    replica_count: int | None = None,
    engine_version: str | None = None,
    claimed_bytes: Mapping[int, int] | None = None,
    load: Load | None = None,
    is_kv_shared: bool = False,
    calibrations: Sequence[Calibration] = (),
) -> Candidate:
    """What one group needs as configured; `fits` and `reasons` say whether this machine has it.

    `replica_count` overrides the group's; `claimed_bytes`: what other groups hold, by card index (-1: host);
    `load`: what speed is predicted for (default: every sequence busy); `is_kv_shared`: a vLLM KV cache of what the
    sequences need instead of all that the memory fraction leaves, since others want the rest.
    Raises ConfigError for settings that contradict each other, HardwareError for a card that is not there.
    """
    shape = shape_of(spec)
    count = group.replicas if replica_count is None else replica_count
    limits = group.limits
    setting = Setting(
        shape=shape,
        machine=machine,
        claimed=claimed_bytes or {},
        load=load or Load(context_tokens=limits.context_tokens, concurrency=limits.sequences * count),
        engine_version=engine_version,
        is_kv_shared=is_kv_shared,
        calibrations=tuple(calibrations),
    )
    remotes = remote_cards(machine, group)
    lists = group.gpu_lists()
    if lists is not None:
        hands = tuple(remotes + hand for hand in replica_cards(machine, lists[:count]))
        return with_limits(setting, group, estimate(setting, group, hands))
    options = [tuple(remotes + hand for hand in hands) for hands in _auto_cards(group, machine, count, setting.claimed)]
    tried = estimate(setting, group, options[0])
    for replicas in options[1:]:
        if tried.fits:
            break
        tried = estimate(setting, group, replicas)
    return with_limits(setting, group, tried)


def plan_model(
    spec: ModelSpec,
    machine: Machine,
    load: Load,
    *,
    model_name: str,
    engines: Sequence[str] = ("llamacpp", "vllm"),
    goal: Goal = "throughput",
    others: Sequence[ModelSpec] = (),
    limits: Limits | None = None,
    engine_versions: Mapping[str, str] | None = None,
    calibrations: Sequence[Calibration] = (),
    claimed_bytes: Mapping[int, int] | None = None,
    want_notes: bool = True,
) -> Plan:
    """Every way of running the model under `load`, best first, the impossible ones last with their reasons.

    `others`: the same model in other files (another format, other quantisations). Of files that run on the same
    engine the finer one wins where both fit: Q8_0 before Q4_K_M.
    """
    question = Question(
        shapes=tuple(shape_of(one) for one in (spec, *others)),
        machine=machine,
        load=load,
        engines=tuple(engines),
        goal=goal,
        limits=limits or Limits(),
        engine_versions=engine_versions or {},
        calibrations=tuple(calibrations),
        claimed=claimed_bytes or {},
    )
    ranked = ranked_candidates(question)
    return Plan(
        model_name=model_name,
        model_path=str(spec.path),
        load=load,
        candidates=ranked,
        notes=remarks(question, ranked) if want_notes else (),
    )


def group_of(candidate: Candidate, limits: Limits, *, gpus: list[int | str | list[int | str]] | None = None) -> Group:
    """A candidate as it would stand in a deployment file; `gpus`: other names for its cards."""
    # RPC devices stand in the file by their servers.
    local = [[index for index in cards if index >= 0] for cards in candidate.replica_cards]
    lists: list[int | str | list[int | str]] = [list(cards) for cards in local]
    is_cpu = not any(local)
    split = candidate.tensor_split if len(set(candidate.replica_splits)) == 1 else None  # a file has one for all
    return Group(
        engine=candidate.engine,  # type: ignore[arg-type]  # one of the config's engines by construction
        replicas=candidate.replicas,
        gpus=[] if is_cpu else (gpus or lists),
        tensor_parallel=candidate.tensor_parallel,
        pipeline_parallel=candidate.pipeline_parallel,
        split_mode=candidate.split_mode or "layer",  # type: ignore[arg-type]  # same
        tensor_split=list(split) if split else "auto",
        limits=replace(
            limits,
            context_tokens=candidate.context_tokens,
            sequences=candidate.sequences,
            kv_cache_bytes=candidate.kv_cache_bytes or "auto",
        ),
    )


def _auto_cards(
    group: Group, machine: Machine, count: int, claimed: Mapping[int, int]
) -> list[tuple[tuple[Card, ...], ...]]:
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
        sizes = [len(node_of(group).ranks)]
    options = [_dealt(ranked, size, count) for size in sizes if size * count <= len(ranked)]
    return options or [_dealt(ranked, min(sizes[0], len(ranked)), count)]


def _dealt(ranked: list[Card], size: int, count: int) -> tuple[tuple[Card, ...], ...]:
    """Replica r takes the next `size` cards, starting over when they run out."""
    hands = [[ranked[(hand * size + slot) % len(ranked)] for slot in range(size)] for hand in range(count)]
    return tuple(tuple(sorted(hand, key=lambda card: card.index)) for hand in hands)
