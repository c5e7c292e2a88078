"""The budget table of LLaMA-2: sizes by precision at 4096 tokens, per engine, and which cards carry them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from llamarack.config import Group, Limits
from llamarack.model.spec import ModelSpec
from llamarack.plan.catalogue import machine_of
from llamarack.plan.planner import plan_group, plan_model
from llamarack.plan.record import Load, Terms
from llamarack.plan.reference import LLAMA2, gguf_spec, safetensors_spec

_CONTEXT_TOKENS = 4096
_SIZES = ("7B", "13B")
_ROOMY = "A100-80"  # a card whose default step is that of the small cards, and which carries every row
_CARDS = ("RTX 4090", "RTX 4090 x2", "A100-80")
_PRECISIONS = (("fp16", "F16", "f16"), ("INT8", "Q8_0", "int8"), ("INT4", "Q4_K_M", "gptq"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`verdicts`: per card set of `columns()`, `fits`, `tight` or `no`."""

    model: str
    precision: str
    engine: str
    quantization: str
    terms: Terms
    total_bytes: int
    total_high_bytes: int
    verdicts: tuple[str, ...]


def columns() -> tuple[str, ...]:
    return _CARDS


def llama2_rows(sequences: int) -> tuple[Row, ...]:
    """7B and 13B x fp16, INT8, INT4 x both engines, each with room for `sequences` of 4096 tokens."""
    rows = []
    for size in _SIZES:
        for precision, gguf, safetensors in _PRECISIONS:
            for spec in (gguf_spec(LLAMA2[size], gguf), safetensors_spec(LLAMA2[size], safetensors)):
                rows.append(_row(f"LLaMA-2-{size}", precision, spec, sequences))
    return tuple(rows)


def _row(model: str, precision: str, spec: ModelSpec, sequences: int) -> Row:
    engine = "llamacpp" if spec.format.value == "gguf" else "vllm"
    group = Group(
        engine=engine,  # type: ignore[arg-type]  # one of the two above
        limits=Limits(context_tokens=_CONTEXT_TOKENS, sequences=sequences),
    )
    card = plan_group(spec, group, machine_of(_ROOMY), model_name=model, is_kv_shared=True).cards[0]
    return Row(
        model=model,
        precision=precision,
        engine=engine,
        quantization=spec.quantization.label,
        terms=card.terms,
        total_bytes=card.total_bytes,
        total_high_bytes=card.total_high_bytes,
        verdicts=tuple(_verdict(spec, cards, sequences) for cards in _CARDS),
    )


def _verdict(spec: ModelSpec, cards: str, sequences: int) -> str:
    load = Load(context_tokens=_CONTEXT_TOKENS, concurrency=sequences)
    best = plan_model(spec, machine_of(cards), load, model_name="", want_notes=False).best
    if best is None:
        return "no"
    return "tight" if best.tight else "fits"
