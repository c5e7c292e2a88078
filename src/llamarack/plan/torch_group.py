"""One `transformers` replica: a single device, weights as stored, KV and activations of the asked load. Pure.

Not measured against a run: the bands are wide and the notes say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarack.config import Group
from llamarack.hardware.machine import Card, Host, Machine
from llamarack.model.spec import ModelFormat
from llamarack.plan.devices import device_plan, shortage
from llamarack.plan.engine_data import context_band
from llamarack.plan.record import Terms
from llamarack.plan.replica import ReplicaPlan
from llamarack.plan.shape import ModelShape

_PREFILL_TOKENS = 2048  # the activations of a longer prompt come in the same proportion
_ACTIVATION_FACTOR = 11  # 2·tokens·hidden·factor bytes, as for vLLM on one card


def plan_replica(
    shape: ModelShape, group: Group, machine: Machine, cards: Sequence[Card], claimed: Mapping[int, int]
) -> ReplicaPlan:
    spec, limits = shape.spec, group.limits
    device: Card | Host = cards[0] if cards else machine.host
    batch = _PREFILL_TOKENS if limits.batch_tokens == "auto" else limits.batch_tokens
    band = context_band("vllm.yaml", "cuda" if cards else "cpu", card=None, driver=None, build=None)
    forward = 2 * min(batch, limits.context_tokens) * spec.hidden_size * _ACTIVATION_FACTOR
    logits = 4 * limits.sequences * spec.vocab_size
    terms = Terms(
        weights_bytes=spec.weights_bytes,
        kv_bytes=2 * limits.sequences * limits.context_tokens * shape.kv_elements_before[-1],
        compute_bytes=forward + logits,
        context_bytes=band.typical_bytes,
    )
    high = terms.total_bytes + terms.compute_bytes + band.high_bytes - band.typical_bytes
    planned = device_plan(device, terms, high, claimed)
    short = shortage(planned)
    problems = [short] if short else []
    if spec.format is not ModelFormat.SAFETENSORS:
        problems.append("transformers reads safetensors; this model is a GGUF file")
    if len(cards) > 1:
        problems.append(f"transformers runs on one card, {len(cards)} are given")
    return ReplicaPlan(
        cards=(planned,),
        problems=tuple(problems),
        notes=("transformers was not measured: activations and context are bands",),
        kv_dtype="f16",
        batch_tokens=batch,
    )
