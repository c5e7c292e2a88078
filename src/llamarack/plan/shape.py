"""A model as the memory and speed formulas see it: bytes per layer, embedding, head. Pure; computed once per plan."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from llamarack.errors import ModelError
from llamarack.model.spec import ModelFormat, ModelSpec, Tensor

_LAYER = re.compile(r"(?:^blk|(?:^|\.)layers)\.(\d+)\.")
_EMBEDDING = ("token_embd.weight", "model.embed_tokens.weight")
_HEAD_PREFIXES = ("output.", "lm_head.")
CUDA_ROW_ELEMENTS = 512  # ggml-cuda.cu MATRIX_ROW_PADDING, b11434
_ALIGNMENT_BYTES = 128  # ggml-cuda.cu buffer alignment, b11434
# CPU_REPACK buffers seen with xllamacpp 2026.10.11549 on AVX2: matrices of these types are copied in another order.
_REPACKED = {"Q4_0", "Q4_K", "IQ4_NL"}
_UNQUANTIZED = {"F32", "F16", "BF16", "F64", "I32", "I64", "I16", "I8"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape:
    """Sums over the tensors of a ModelSpec; equal only to itself, so that it can key a cache.

    `*_padded_bytes`: with the row padding of llama.cpp's CUDA buffers.
    """

    spec: ModelSpec
    layers_before_bytes: tuple[int, ...]  # [i]: layers 0 to i-1
    layers_before_padded_bytes: tuple[int, ...]
    kv_elements_before: tuple[int, ...]  # [i]: K and V elements per cell of layers 0 to i-1
    embedding_bytes: int
    head_bytes: int  # the output matrix and the final norm; a tied head counts the embedding again
    head_padded_bytes: int
    cpu_bytes: int  # all weights as llama.cpp holds them on the CPU

    @property
    def decode_bytes(self) -> int:
        """Bytes of weights one decode step reads: all but the embedding table, of which it gathers rows."""
        return self.layers_before_bytes[-1] + self.head_bytes

    @property
    def feed_forward_size(self) -> int:
        return max(self.spec.feed_forward_sizes)

    @property
    def query_heads(self) -> int:
        return max(self.spec.attention_heads)

    @property
    def kv_heads(self) -> int:
        return max(self.spec.kv_heads)

    @property
    def decode_parameters(self) -> int:
        """Weights that take part in a step, whatever their storage: for arithmetic."""
        spec = self.spec
        attention = sum(
            spec.hidden_size * (2 * heads * spec.head_size_k + kv * (spec.head_size_k + spec.head_size_v))
            for heads, kv in zip(spec.attention_heads, spec.kv_heads, strict=True)
        )
        feed_forward = sum(3 * spec.hidden_size * size for size in spec.feed_forward_sizes)
        return attention + feed_forward + spec.hidden_size * spec.vocab_size


def shape_of(spec: ModelSpec) -> ModelShape:
    """Raises ModelError where the tensors do not make up the layers that the header promises."""
    layers = [0] * spec.layers
    padded = [0] * spec.layers
    embedding = head = head_padded = embedding_padded = 0
    for tensor in spec.tensors:
        layer = _layer_of(tensor, spec)
        if layer is not None:
            layers[layer] += tensor.size_bytes
            padded[layer] += _cuda_bytes(tensor, spec.format)
        elif tensor.name in _EMBEDDING:
            embedding += tensor.size_bytes
            embedding_padded += _cuda_bytes(tensor, spec.format)
        else:
            head += tensor.size_bytes
            head_padded += _cuda_bytes(tensor, spec.format)
    if any(size == 0 for size in layers):
        raise ModelError(
            f"`{spec.path}`: the header says {spec.layers} layers, layer {layers.index(0)} has no tensors",
            hint="the file is truncated or a shard is missing; fetch it again",
        )
    tied = spec.tied_embeddings and not any(tensor.name.startswith(_HEAD_PREFIXES) for tensor in spec.tensors)
    if tied:
        head += embedding
        head_padded += embedding_padded
    return ModelShape(
        spec=spec,
        layers_before_bytes=_running(layers),
        layers_before_padded_bytes=_running(padded),
        kv_elements_before=_running(heads * (spec.head_size_k + spec.head_size_v) for heads in spec.kv_heads),
        embedding_bytes=embedding,
        head_bytes=head,
        head_padded_bytes=head_padded,
        cpu_bytes=_cpu_bytes(spec, head_is_tied=tied),
    )


def _layer_of(tensor: Tensor, spec: ModelSpec) -> int | None:
    match = _LAYER.search(tensor.name)
    if match is None:
        return None
    index = int(match[1])
    if index >= spec.layers:
        raise ModelError(
            f"`{spec.path}`: tensor `{tensor.name}` is of layer {index}, the header says {spec.layers} layers",
            hint="the file is damaged or was edited; fetch it again",
        )
    return index


def _running(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))


def _cpu_bytes(spec: ModelSpec, *, head_is_tied: bool) -> int:
    """The mapped part of the file, which reaches from the first to the last tensor used in place, and the copies.

    The mapped pages of a copied matrix can be taken back by the kernel; until then both are resident.
    """
    if spec.format is not ModelFormat.GGUF:
        return spec.weights_bytes
    embedding = next((tensor for tensor in spec.tensors if tensor.name in _EMBEDDING), None)
    copied = [tensor.type in _REPACKED and len(tensor.shape) > 1 and tensor is not embedding for tensor in spec.tensors]
    copies = sum(tensor.size_bytes for tensor, is_copied in zip(spec.tensors, copied, strict=True) if is_copied)
    in_place = [index for index, is_copied in enumerate(copied) if not is_copied]
    mapped = sum(tensor.size_bytes for tensor in spec.tensors[in_place[0] : in_place[-1] + 1]) if in_place else 0
    if head_is_tied and embedding is not None and embedding.type in _REPACKED:
        copies += embedding.size_bytes
    return mapped + copies


def _cuda_bytes(tensor: Tensor, form: ModelFormat) -> int:
    """Size in a CUDA buffer: quantised rows end on 512 elements, tensors on 128 bytes."""
    size = tensor.size_bytes
    if form is ModelFormat.GGUF and tensor.type not in _UNQUANTIZED and tensor.shape[0] % CUDA_ROW_ELEMENTS:
        elements = 1
        for extent in tensor.shape:
            elements *= extent
        missing = CUDA_ROW_ELEMENTS - tensor.shape[0] % CUDA_ROW_ELEMENTS
        size += round(missing * tensor.size_bytes / elements)
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
