"""Which part of each tensor a vLLM rank holds, and which cuts are not legal, in words. Pure.

Rules read in vLLM 0.33.0: `model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `distributed/utils.py`,
`layers/quantization/utils/marlin_utils.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from llamarack.model.spec import ModelFormat, ModelSpec, Tensor
from llamarack.plan.shape import ModelShape

_VOCABULARY_PADDING = 64
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_KV = re.compile(r"\.(k_proj|v_proj)\.")
_BY_OUTPUT = re.compile(r"\.(q_proj|qkv_proj|gate_proj|up_proj|gate_up_proj)\.")
_BY_INPUT = re.compile(r"\.(o_proj|down_proj)\.")
_READABLE = ("f32", "f16", "bf16", "gptq", "awq", "fp8", "compressed-tensors")
_MARLIN_OUTPUTS, _MARLIN_INPUTS = 64, 128  # a rank's matrix must divide by these


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """`layers`: the span of one pipeline stage; every tensor-parallel rank of the stage holds the same."""

    weights_bytes: int
    layers: range


def padded_vocabulary(vocab_size: int) -> int:
    return -(-vocab_size // _VOCABULARY_PADDING) * _VOCABULARY_PADDING


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Whole layers per stage; the remainder goes to the second-last stage and backwards, the first comes last."""
    sizes = [layers // stages] * stages
    for extra in range(layers % stages):
        sizes[stages - 2 - extra] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def shard(shape: ModelShape, tensor_parallel: int, pipeline_parallel: int) -> tuple[RankWeights, ...]:
    """What one rank of each pipeline stage holds."""
    layer_bytes, embedding, head, norm = _cut(shape, tensor_parallel)
    tied = shape.spec.tied_embeddings
    stages = stage_layers(shape.spec.layers, pipeline_parallel)
    weights = []
    for stage, layers in enumerate(stages):
        size = sum(layer_bytes[layers.start : layers.stop])
        is_first, is_last = stage == 0, stage == len(stages) - 1
        size += embedding if is_first or (is_last and tied) else 0
        size += head + norm if is_last else 0
        weights.append(RankWeights(weights_bytes=size, layers=layers))
    return tuple(weights)


@lru_cache(maxsize=64)
def _cut(shape: ModelShape, degree: int) -> tuple[tuple[int, ...], int, int, int]:
    """Bytes on one rank: every layer; embedding; head; what lies outside."""
    spec = shape.spec
    layers = [0.0] * spec.layers
    embedding = head = rest = 0.0
    vocabulary = padded_vocabulary(spec.vocab_size) / spec.vocab_size / degree
    for tensor in spec.tensors:
        match = _LAYER.search(tensor.name)
        if match:
            layers[int(match[1])] += tensor.size_bytes * _share(tensor, spec, int(match[1]), degree)
        elif "embed_tokens" in tensor.name:
            embedding += tensor.size_bytes * vocabulary
        elif tensor.name.startswith("lm_head."):
            head += tensor.size_bytes * vocabulary
        else:
            rest += tensor.size_bytes
    if spec.tied_embeddings:
        head = 0.0  # one tensor serves both
    return tuple(map(round, layers)), round(embedding), round(head), round(rest)


def _share(tensor: Tensor, spec: ModelSpec, layer: int, degree: int) -> float:
    """Fraction of a layer's tensor on one rank."""
    if _KV.search(tensor.name):
        if tensor.name.endswith("g_idx"):
            return 1.0
        heads = spec.kv_heads[layer]
        return max(1, heads // degree) / heads
    if _BY_OUTPUT.search(tensor.name):
        return 1.0 if tensor.name.endswith("g_idx") else 1 / degree
    if _BY_INPUT.search(tensor.name):
        per_output = tensor.name.endswith(("weight_scale", "bias")) and len(tensor.shape) <= 2
        return 1.0 if per_output else 1 / degree
    return 1.0


def illegal_cut(spec: ModelSpec, tensor_parallel: int, pipeline_parallel: int) -> list[str]:
    """Why vLLM cannot cut this model so; empty where it can."""
    reasons = []
    if spec.format is not ModelFormat.SAFETENSORS:
        return ["vllm reads safetensors; this model is a GGUF file"]
    if spec.quantization.method not in _READABLE:
        return [f"vllm has no rule here for the quantisation `{spec.quantization.method}`"]
    if pipeline_parallel > spec.layers:
        reasons.append(f"{spec.layers} layers do not make {pipeline_parallel} stages")
    if tensor_parallel == 1:
        return reasons
    degree = tensor_parallel
    for heads in sorted(set(spec.attention_heads)):
        if heads % degree:
            reasons.append(f"{heads} heads do not divide by {degree}")
    for heads in sorted(set(spec.kv_heads)):
        if (heads >= degree and heads % degree) or (heads < degree and degree % heads):
            reasons.append(f"{heads} KV heads neither divide by {degree} nor into it")
    if padded_vocabulary(spec.vocab_size) % degree:
        reasons.append(f"the vocabulary of {padded_vocabulary(spec.vocab_size)} (padded) does not divide by {degree}")
    return reasons + _illegal_groups(spec, degree)


def _illegal_groups(spec: ModelSpec, degree: int) -> list[str]:
    """Rows of a quantised matrix must be cut between groups, and in pieces the kernel can take."""
    method, group = spec.quantization.method, spec.quantization.group_size
    reasons = []
    for size in sorted(set(spec.feed_forward_sizes)):
        if size % degree:
            reasons.append(f"the feed-forward width {size} does not divide by {degree}")
        elif method in {"gptq", "awq"}:
            label = method.upper()
            if group and group > 0 and (size // degree) % group:
                reasons.append(f"{label} group {group} does not divide {size}/{degree}")
            elif (size // degree) % _MARLIN_INPUTS or (size // degree) % _MARLIN_OUTPUTS:
                reasons.append(f"the {label} kernel needs a multiple of {_MARLIN_INPUTS}, {size}/{degree} is not")
    return reasons
