"""Records: what a model's files say about themselves. No I/O. Units: bytes, tokens; shapes are the file's own order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class ModelFormat(StrEnum):
    GGUF = "gguf"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor as stored. `shape`: GGUF order is fastest dimension first, safetensors order slowest first."""

    name: str
    shape: tuple[int, ...]
    type: str  # GGUF type name (`Q4_K`) or safetensors dtype (`BF16`)
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerIdentity:
    """Who the tokenizer is, as far as the model's files say."""

    kind: str | None  # `llama` (SentencePiece), `gpt2` (byte BPE), ...
    pre: str | None  # GGUF `tokenizer.ggml.pre`
    vocab_size: int | None  # tokens the tokenizer defines
    sha256: str | None  # of the canonical token list, so that GGUF and tokenizer.json forms agree
    file_sha256: tuple[tuple[str, str], ...] = ()  # (file name, hash) of tokenizer files beside the weights
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    unk_id: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    known_as: str | None = None  # a family's name, where the hash is a known one


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the weights are stored. `method`: f32, f16, bf16, gguf, gptq, awq, fp8, compressed-tensors."""

    method: str
    label: str  # what people call it: `Q4_K_M`, `F16`, `GPTQ-4bit-128g`
    bits: float | None = None
    group_size: int | None = None
    activations: str | None = None  # `int8`, `fp8` where activations are quantised too
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. Per-layer values are tuples as long as `layers`."""

    path: Path
    files: tuple[Path, ...]
    format: ModelFormat
    architecture: str  # `llama`
    name: str | None
    layers: int
    hidden_size: int
    feed_forward_sizes: tuple[int, ...]
    attention_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_size_k: int
    head_size_v: int
    vocab_size: int  # rows of the embedding
    context_train_tokens: int | None
    tied_embeddings: bool
    quantization: Quantization
    tensors: tuple[Tensor, ...]
    tokenizer: TokenizerIdentity
    chat_template: str | None
    rope_freq_base: float | None = None

    @property
    def weights_bytes(self) -> int:
        """Sum over all tensors as stored."""
        return sum(tensor.size_bytes for tensor in self.tensors)
