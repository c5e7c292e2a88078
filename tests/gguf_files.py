"""Writes GGUF files byte by byte, honest or broken, at full size without their weights (sparse).

Independent of the package under test and of the gguf package, so that both can be held against it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# ggml type ids and (elements, bytes) of a block
F32, F16, Q4_0, Q8_0, Q4_K, Q6_K = 0, 1, 2, 8, 12, 14
BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q8_0: (32, 34), Q4_K: (256, 144), Q6_K: (256, 210)}

Row = tuple[str, tuple[int, ...], int]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type id and value: bool, int (u32), float (f32), str, list of str, list of int (i32), list of float (f32)."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if item and isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(text(one) for one in item)
    code, type_id = ("f", 6) if item and isinstance(item[0], float) else ("i", 5)
    return struct.pack(f"<IIQ{len(item)}{code}", 9, type_id, len(item), *item)


def size_bytes(row: Row) -> int:
    elements, size = BLOCKS[row[2]]
    total = 1
    for dimension in row[1]:
        total *= dimension
    return total // elements * size


def header(metadata: Mapping[str, Any], rows: Iterable[Row], *, version: int = 3) -> bytes:
    """Everything before the padding in front of the data."""
    rows = list(rows)
    parts = [b"GGUF", struct.pack("<IQQ", version, len(rows), len(metadata))]
    parts += [text(key) + (item if isinstance(item, bytes) else value(item)) for key, item in metadata.items()]
    offset = 0
    for row in rows:
        name, shape, type_id = row
        parts.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset))
        offset += -(-size_bytes(row) // 32) * 32
    return b"".join(parts)


def write(path: Path, metadata: Mapping[str, Any], rows: Iterable[Row]) -> Path:
    rows = list(rows)
    head = header(metadata, rows)
    start = -(-len(head) // 32) * 32
    data = sum(-(-size_bytes(row) // 32) * 32 for row in rows)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(start + data)
    return path


def llama_metadata(
    *, layers: int, hidden: int, feed_forward: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """A converted LLaMA's metadata with `vocab` made-up SentencePiece tokens. `more`: keys, `__` read as `.`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = (tokens + [f"\u2581piece{number}" for number in range(vocab)])[:vocab]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "made",
        "general.file_type": 2,
        "llama.block_count": layers,
        "llama.context_length": 4096,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": feed_forward,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * vocab,
        "tokenizer.ggml.token_type": [1] * vocab,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    return metadata | {key.replace("__", "."): item for key, item in more.items()}


def llama_rows(
    *,
    layers: int,
    hidden: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    type_id: int = Q4_0,
    head_type_id: int | None = Q6_K,
) -> list[Row]:
    """The tensors of a LLaMA; `head_type_id` None ties the output head to the embedding."""
    kv_size = hidden // heads * kv_heads
    rows: list[Row] = [("token_embd.weight", (hidden, vocab), type_id)]
    for layer in range(layers):
        rows += [
            (f"blk.{layer}.attn_norm.weight", (hidden,), F32),
            (f"blk.{layer}.attn_q.weight", (hidden, hidden), type_id),
            (f"blk.{layer}.attn_k.weight", (hidden, kv_size), type_id),
            (f"blk.{layer}.attn_v.weight", (hidden, kv_size), type_id),
            (f"blk.{layer}.attn_output.weight", (hidden, hidden), type_id),
            (f"blk.{layer}.ffn_norm.weight", (hidden,), F32),
            (f"blk.{layer}.ffn_gate.weight", (hidden, feed_forward), type_id),
            (f"blk.{layer}.ffn_up.weight", (hidden, feed_forward), type_id),
            (f"blk.{layer}.ffn_down.weight", (feed_forward, hidden), type_id),
        ]
    rows.append(("output_norm.weight", (hidden,), F32))
    if head_type_id is not None:
        rows.append(("output.weight", (hidden, vocab), head_type_id))
    return rows


LLAMA2 = {
    "7b": {"layers": 32, "hidden": 4096, "feed_forward": 11008, "heads": 32, "kv_heads": 32, "vocab": 32000},
    "13b": {"layers": 40, "hidden": 5120, "feed_forward": 13824, "heads": 40, "kv_heads": 40, "vocab": 32000},
    "70b": {"layers": 80, "hidden": 8192, "feed_forward": 28672, "heads": 64, "kv_heads": 8, "vocab": 32000},
}
SMALL = {"layers": 2, "hidden": 64, "feed_forward": 96, "heads": 4, "kv_heads": 2, "vocab": 300}


def write_llama(path: Path, shape: Mapping[str, int] = SMALL, *, type_id: int = F16, **more: Any) -> Path:
    """A complete sparse model file; `more` as in llama_metadata."""
    rows = llama_rows(**shape, type_id=type_id, head_type_id=type_id)
    return write(path, llama_metadata(**shape, **more), rows)
