"""Model specs made from dimensions, without files: the tables of `plan --table`, and models "as they would be".

Tensor shapes and names follow the LLaMA architecture in GGUF and safetensors; sizes follow from the formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llamarack.model.spec import ModelFormat, ModelSpec, Quantization, Tensor, TokenizerIdentity

# Elements and bytes of a block, ggml-common.h b11434.
_GGUF_BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
_SAFETENSORS_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I8": 1, "F8_E4M3": 1}
_GROUP_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    name: str
    layers: int
    hidden_size: int
    feed_forward_size: int
    attention_heads: int
    kv_heads: int
    head_size: int = 128
    vocab_size: int = 32000
    context_train_tokens: int = 4096
    tied_embeddings: bool = False


# Meta's config.json of each model.
LLAMA2 = {
    "7B": Dimensions(
        name="llama-2-7b", layers=32, hidden_size=4096, feed_forward_size=11008, attention_heads=32, kv_heads=32
    ),
    "13B": Dimensions(
        name="llama-2-13b", layers=40, hidden_size=5120, feed_forward_size=13824, attention_heads=40, kv_heads=40
    ),
    "70B": Dimensions(
        name="llama-2-70b", layers=80, hidden_size=8192, feed_forward_size=28672, attention_heads=64, kv_heads=8
    ),
}


def gguf_spec(size: Dimensions, label: str) -> ModelSpec:
    """`label`: F16, Q8_0, Q4_0, Q4_1 or Q4_K_M."""
    tensors = tuple(
        _tensor(name, shape, _gguf_type(name, shape, label, size), _GGUF_BLOCKS) for name, shape in _gguf_shapes(size)
    )
    method = "f16" if label == "F16" else "gguf"
    return _spec(size, ModelFormat.GGUF, Quantization(method=method, label=label), tensors)


def safetensors_spec(size: Dimensions, method: str) -> ModelSpec:
    """`method`: f16, gptq, awq (both 4 bit, groups of 128), fp8 or int8 (compressed-tensors W8A8)."""
    tensors = tuple(tensor for name, shape in _hf_shapes(size) for tensor in _hf_tensors(name, shape, method))
    four_bits = method in {"gptq", "awq"}
    quantization = {
        "f16": Quantization(method="f16", label="F16"),
        "gptq": Quantization(method="gptq", label="GPTQ-4bit-128g", bits=4, group_size=_GROUP_SIZE),
        "awq": Quantization(method="awq", label="AWQ-4bit-128g", bits=4, group_size=_GROUP_SIZE),
        "fp8": Quantization(method="fp8", label="FP8", bits=8, activations="fp8"),
        "int8": Quantization(method="compressed-tensors", label="W8A8", bits=8, activations="int8"),
    }[method]
    assert four_bits == (quantization.bits == 4)
    return _spec(size, ModelFormat.SAFETENSORS, quantization, tensors)


def _spec(size: Dimensions, form: ModelFormat, quantization: Quantization, tensors: tuple[Tensor, ...]) -> ModelSpec:
    return ModelSpec(
        path=Path(f"{size.name}-{quantization.label}"),
        files=(),
        format=form,
        architecture="llama",
        name=size.name,
        layers=size.layers,
        hidden_size=size.hidden_size,
        feed_forward_sizes=(size.feed_forward_size,) * size.layers,
        attention_heads=(size.attention_heads,) * size.layers,
        kv_heads=(size.kv_heads,) * size.layers,
        head_size_k=size.head_size,
        head_size_v=size.head_size,
        vocab_size=size.vocab_size,
        context_train_tokens=size.context_train_tokens,
        tied_embeddings=size.tied_embeddings,
        quantization=quantization,
        tensors=tensors,
        tokenizer=TokenizerIdentity(kind="llama", pre=None, vocab_size=size.vocab_size, sha256=None),
        chat_template=None,
    )


def _tensor(name: str, shape: tuple[int, ...], kind: str, blocks: dict[str, tuple[int, int]]) -> Tensor:
    elements, size = blocks[kind]
    return Tensor(name=name, shape=shape, type=kind, size_bytes=prod(shape) // elements * size)


def _gguf_shapes(size: Dimensions) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Fastest dimension first."""
    hidden, kv = size.hidden_size, size.kv_heads * size.head_size
    query = size.attention_heads * size.head_size
    yield "token_embd.weight", (hidden, size.vocab_size)
    yield "output_norm.weight", (hidden,)
    if not size.tied_embeddings:
        yield "output.weight", (hidden, size.vocab_size)
    for layer in range(size.layers):
        for name, shape in (
            ("attn_norm", (hidden,)),
            ("attn_q", (hidden, query)),
            ("attn_k", (hidden, kv)),
            ("attn_v", (hidden, kv)),
            ("attn_output", (query, hidden)),
            ("ffn_norm", (hidden,)),
            ("ffn_gate", (hidden, size.feed_forward_size)),
            ("ffn_up", (hidden, size.feed_forward_size)),
            ("ffn_down", (size.feed_forward_size, hidden)),
        ):
            yield f"blk.{layer}.{name}.weight", shape


def _gguf_type(name: str, shape: tuple[int, ...], label: str, size: Dimensions) -> str:
    """llama.cpp's own mixture of Q4_K_M (src/llama-quant.cpp, b11434); the other labels are uniform."""
    if len(shape) == 1:
        return "F32"
    if label != "Q4_K_M":
        return label
    if name == "output.weight":
        return "Q6_K"
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, layers = int(name.split(".")[1]), size.layers
        if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2:
            return "Q6_K"
        if name.endswith("attn_v.weight") and size.layers == 80:
            return "Q5_K"
    return "Q4_K"


def _hf_shapes(size: Dimensions) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Slowest dimension first: (out, in) for matrices."""
    hidden, kv = size.hidden_size, size.kv_heads * size.head_size
    query = size.attention_heads * size.head_size
    yield "model.embed_tokens.weight", (size.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not size.tied_embeddings:
        yield "lm_head.weight", (size.vocab_size, hidden)
    for layer in range(size.layers):
        for name, shape in (
            ("input_layernorm", (hidden,)),
            ("self_attn.q_proj", (query, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, query)),
            ("post_attention_layernorm", (hidden,)),
            ("mlp.gate_proj", (size.feed_forward_size, hidden)),
            ("mlp.up_proj", (size.feed_forward_size, hidden)),
            ("mlp.down_proj", (hidden, size.feed_forward_size)),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape


def _hf_tensors(name: str, shape: tuple[int, ...], method: str) -> Iterator[Tensor]:
    """A matrix as the method stores it; embeddings, head and norms stay F16."""
    blocks = {kind: (1, size) for kind, size in _SAFETENSORS_BYTES.items()}
    if method == "f16" or len(shape) == 1 or "_proj" not in name:
        yield _tensor(name, shape, "F16", blocks)
        return
    rows_out, rows_in = shape
    stem = name.removesuffix(".weight")
    if method in {"fp8", "int8"}:
        yield _tensor(name, shape, "F8_E4M3" if method == "fp8" else "I8", blocks)
        yield _tensor(f"{stem}.weight_scale", (rows_out, 1), "F32", blocks)
        return
    groups = rows_in // _GROUP_SIZE
    packed = (rows_in // 8, rows_out) if method == "gptq" else (rows_in, rows_out // 8)
    yield _tensor(f"{stem}.qweight", packed, "I32", blocks)
    yield _tensor(f"{stem}.qzeros", (groups, rows_out // 8), "I32", blocks)
    yield _tensor(f"{stem}.scales", (groups, rows_out), "F16", blocks)
    if method == "gptq":
        yield _tensor(f"{stem}.g_idx", (rows_in,), "I32", blocks)
