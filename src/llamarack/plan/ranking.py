"""All ways of running a model, weighed and put in order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from llamarack.config import Group, Limits
from llamarack.errors import ConfigError
from llamarack.hardware.machine import Machine
from llamarack.model.spec import ModelFormat
from llamarack.plan import placement
from llamarack.plan.calibration import Calibration
from llamarack.plan.estimate import Setting, estimate
from llamarack.plan.limits import with_limits
from llamarack.plan.placement import Way
from llamarack.plan.record import Candidate, Load
from llamarack.plan.shape import ModelShape

Goal = Literal["throughput", "latency"]
FORMATS = {"llamacpp": ModelFormat.GGUF, "vllm": ModelFormat.SAFETENSORS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `plan_model` was asked. `shapes`: the model's files, the first one being the one named."""

    shapes: tuple[ModelShape, ...]
    machine: Machine
    load: Load
    engines: tuple[str, ...]
    goal: Goal = "throughput"
    limits: Limits = field(default_factory=Limits)
    engine_versions: Mapping[str, str] = field(default_factory=dict)
    calibrations: tuple[Calibration, ...] = ()
    claimed: Mapping[int, int] = field(default_factory=dict)


def ranked_candidates(question: Question, *, want_limits: bool = True) -> tuple[Candidate, ...]:
    """Best first; those that do not fit last, with their reasons. Of one engine's files the finest that fits leads.

    Raises ConfigError where the limits suit no engine, such as a KV type that only the other one has.

    `want_limits`: fill `max_sequences` and `max_context_tokens`, which llama.cpp's are searched for.
    """
    found: list[tuple[Candidate, float]] = []
    unusable: list[ConfigError] = []
    is_any_usable = False
    for engine in question.engines:
        readable = [shape for shape in question.shapes if FORMATS[engine] is shape.spec.format]
        for shape in readable or question.shapes[:1]:
            setting = Setting(
                shape=shape,
                machine=question.machine,
                claimed=question.claimed,
                load=question.load,
                engine_version=question.engine_versions.get(engine),
                calibrations=question.calibrations,
            )
            bits = 8 * shape.decode_bytes / shape.decode_parameters
            ways = list(placement.ways(engine, question.machine, question.load.concurrency))
            try:  # an engine that can read none of the files is shown once, refused
                own = _candidates(setting, ways if readable else ways[:1], question.limits, want_limits)
            except ConfigError as error:
                unusable.append(error)
                continue
            is_any_usable |= bool(readable)
            found += [(candidate, bits) for candidate in own]
    if unusable and not is_any_usable:
        raise unusable[0]
    finest: dict[str, float] = {}
    for candidate, bits in found:
        if candidate.fits and not candidate.tight:
            finest[candidate.engine] = max(bits, finest.get(candidate.engine, 0.0))
    ordered = sorted(
        found,
        key=lambda pair: _rank(pair[0], question.goal, is_coarser=pair[1] < 0.95 * finest.get(pair[0].engine, 0.0)),
    )
    return tuple(candidate for candidate, _ in ordered)


def _candidates(setting: Setting, ways: Sequence[Way], limits: Limits, want_limits: bool) -> list[Candidate]:
    found = []
    load = setting.load
    refused: set[tuple[str, ...]] = set()
    for way in ways:
        group = _group(way, load, limits)
        candidate = estimate(setting, group, way.replicas, needed_sequences=group.limits.sequences)
        cards = way.replicas[0]
        senseless = placement.senseless_exchange(setting.shape, cards, _cut_degree(way))
        if candidate.fits and senseless:
            candidate = replace(candidate, fits=False, tight=False, reasons=(senseless,))
        key = (way.engine, str(way.tensor_parallel), str(way.pipeline_parallel), way.split_mode, *candidate.reasons)
        if not candidate.fits and key in refused:
            continue  # fewer replicas of what was refused for the same reason say nothing new
        if not candidate.fits:
            refused.add(key)
        found.append(with_limits(setting, group, candidate) if want_limits else candidate)
    return found


def _cut_degree(way: Way) -> int:
    if way.engine == "llamacpp":
        return len(way.replicas[0]) if way.split_mode == "tensor" else 1
    return way.tensor_parallel


def _group(way: Way, load: Load, limits: Limits) -> Group:
    count = len(way.replicas)
    indices: list[int | str | list[int | str]] = [[card.index for card in cards] for cards in way.replicas]
    return Group(
        engine=way.engine,  # type: ignore[arg-type]  # placement knows the config's engines only
        replicas=count,
        gpus=indices if any(way.replicas) else [],
        tensor_parallel=way.tensor_parallel,
        pipeline_parallel=way.pipeline_parallel,
        split_mode=way.split_mode,  # type: ignore[arg-type]  # same
        limits=replace(limits, context_tokens=load.context_tokens, sequences=ceil(load.concurrency / count)),
    )


def _rank(candidate: Candidate, goal: Goal, *, is_coarser: bool) -> tuple[float, ...]:
    """Comfortable before tight before impossible; finer weights before coarser; what the engine calls experimental
    last; then the goal; then fewer cards.
    """
    predicted = candidate.predicted
    cards = sum(map(len, candidate.replica_cards))
    if goal == "latency":
        speed = predicted.per_token_s if predicted.per_token_s is not None else float("inf")
    else:
        # Where no speed is known, more copies of the model are the better guess, if each has a card of its own.
        copies = candidate.replicas if cards else -candidate.replicas
        speed = -predicted.tokens_per_s if predicted.tokens_per_s is not None else -copies
    is_experimental = candidate.split_mode == "tensor" and cards > candidate.replicas
    return (not candidate.fits, candidate.tight, is_coarser, is_experimental, speed, cards)
