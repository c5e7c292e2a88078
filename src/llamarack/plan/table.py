"""The budget table of LLaMA-2: what each size takes by precision and engine, and on which cards it runs how. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamarack.config import Group, Limits
from llamarack.hardware.machine import Machine
from llamarack.model.spec import ModelSpec
from llamarack.plan import llamacpp, vllm
from llamarack.plan.catalogue import machine_of
from llamarack.plan.planner import plan_group, plan_model
from llamarack.plan.record import Candidate, Load, Terms
from llamarack.plan.reference import LLAMA2, gguf_spec, safetensors_spec
from llamarack.plan.remarks import describe
from llamarack.units import GIB

_ROOMY = "A100-80"
_ROOMY_BYTES = 64 * 1024 * GIB  # so that a row shows what the load asks for, not what a card could give it
_EXAMPLES = ("RTX 4090", "RTX 4090 x2", "A100-80", "A100-80 x2")
_PRECISIONS = (("fp16", "F16", "f16"), ("INT8", "Q8_0", "int8"), ("INT4", "Q4_K_M", "gptq"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSet:
    name: str
    machine: Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The first way of `plan` that fits. `max_sequences`: of all replicas together."""

    way: str
    tokens_per_s: float | None
    per_token_s: float | None
    first_token_s: float | None
    max_sequences: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`terms` and totals: on one card that holds all of it. `verdicts`: per card set `fits`, `tight` or `no`; `best`:
    likewise, None where it does not fit."""

    model: str
    precision: str
    engine: str
    quantization: str
    terms: Terms
    total_bytes: int
    total_high_bytes: int
    verdicts: tuple[str, ...]
    best: tuple[Best | None, ...]


def example_sets() -> tuple[CardSet, ...]:
    return tuple(CardSet(name=name, machine=machine_of(name)) for name in _EXAMPLES)


def llama2_rows(sets: Sequence[CardSet], load: Load, limits: Limits) -> tuple[Row, ...]:
    """7B, 13B and 70B x fp16, INT8, INT4 x the engines that know the KV type, each with room for the load."""
    known = {"llamacpp": (*llamacpp.KV_ELEMENT_BYTES, "auto"), "vllm": tuple(vllm.KV_ELEMENT_BYTES)}
    rows = []
    for size, dimensions in LLAMA2.items():
        for precision, gguf, safetensors in _PRECISIONS:
            specs = {"llamacpp": gguf_spec(dimensions, gguf), "vllm": safetensors_spec(dimensions, safetensors)}
            for engine, spec in specs.items():
                if limits.kv_dtype in known[engine]:
                    rows.append(_row(f"LLaMA-2-{size}", precision, engine, spec, sets, load, limits))
    return tuple(rows)


def _row(
    model: str, precision: str, engine: str, spec: ModelSpec, sets: Sequence[CardSet], load: Load, limits: Limits
) -> Row:
    asked: dict[str, Any] = {"context_tokens": load.context_tokens, "sequences": load.concurrency}
    real = machine_of(_ROOMY).cards[0]
    if engine == "vllm":  # whose own step grows with the card
        asked["batch_tokens"] = vllm.default_batch_tokens(real.name, real.memory_total_bytes)
    group = Group(engine=engine, limits=replace(limits, **asked))  # type: ignore[arg-type]  # one of the two
    card = plan_group(spec, group, _roomy_machine(), model_name=model, is_kv_shared=True).cards[0]
    ways = [
        plan_model(spec, one.machine, load, model_name="", engines=(engine,), limits=limits, want_notes=False).best
        for one in sets
    ]
    return Row(
        model=model,
        precision=precision,
        engine=engine,
        quantization=spec.quantization.label,
        terms=card.terms,
        total_bytes=card.total_bytes,
        total_high_bytes=card.total_high_bytes,
        verdicts=tuple(_verdict(way) for way in ways),
        best=tuple(_best(way) for way in ways),
    )


def _roomy_machine() -> Machine:
    machine = machine_of(_ROOMY)
    card = replace(machine.cards[0], memory_total_bytes=_ROOMY_BYTES, memory_free_bytes=_ROOMY_BYTES)
    return replace(machine, cards=(card,))


def _verdict(way: Candidate | None) -> str:
    if way is None:
        return "no"
    return "tight" if way.tight else "fits"


def _best(way: Candidate | None) -> Best | None:
    if way is None:
        return None
    return Best(
        way=describe(way),
        tokens_per_s=way.predicted.tokens_per_s,
        per_token_s=way.predicted.per_token_s,
        first_token_s=way.predicted.first_token_s,
        max_sequences=None if way.max_sequences is None else way.max_sequences * way.replicas,
    )
