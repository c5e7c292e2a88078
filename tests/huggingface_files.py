"""Writes small Hugging Face model folders: the counterpart of the GGUF that tests.tiny_model writes, or broken ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_model import CHATML, tiny_tensors, vocabulary

DTYPES = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def huggingface_name(gguf_name: str) -> str:
    if gguf_name in _OUTER:
        return _OUTER[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}"


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        header[name] = {"dtype": DTYPES[array.dtype], "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(array.tobytes() for array in tensors.values()))
    return path


def tokenizer_json(pieces: list[str]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": pieces[number], "special": True} for number in range(3)],
        "model": {"type": "BPE", "byte_fallback": True, "vocab": {p: n for n, p in enumerate(pieces)}, "merges": []},
    }


def sentencepiece(pieces: list[str]) -> bytes:
    """The protobuf of a tokenizer.model: pieces with scores and types, then a trainer_spec field to step over."""

    def field(number: int, raw: bytes) -> bytes:
        size, head = len(raw), bytes([number << 3 | 2])
        while size > 0x7F:
            head, size = head + bytes([size & 0x7F | 0x80]), size >> 7
        return head + bytes([size]) + raw

    rows = [field(1, piece.encode()) + b"\x15" + struct.pack("<f", -1.0) + b"\x18\x01" for piece in pieces]
    return b"".join(field(1, row) for row in rows) + field(2, b"\x0a\x03abc")


def write_tiny_huggingface(folder: Path, **changes: Any) -> Path:
    """The same model as `write_tiny_llama()` with its defaults; `changes` are laid over config.json (None removes)."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = vocabulary()[0]
    config = {
        "model_type": "llama",
        "_name_or_path": "tiny-llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(pieces),
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    _write_json(folder / "config.json", {key: value for key, value in config.items() if value is not None})
    _write_json(folder / "tokenizer.json", tokenizer_json(pieces))
    (folder / "tokenizer.model").write_bytes(sentencepiece(pieces))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    settings |= {"add_bos_token": True, "add_eos_token": False, "chat_template": CHATML}
    _write_json(folder / "tokenizer_config.json", settings)
    tensors = tiny_tensors(2, 4, 2, 64, 128, len(pieces), 0)
    write_safetensors(folder / "model.safetensors", {huggingface_name(name): one for name, one in tensors.items()})
    return folder


def write_sharded(folder: Path, *, shards: int = 2, **changes: Any) -> Path:
    """The same, its weights in numbered shards with an index."""
    write_tiny_huggingface(folder, **changes)
    (folder / "model.safetensors").unlink()
    tensors = {huggingface_name(n): one for n, one in tiny_tensors(2, 4, 2, 64, 128, len(vocabulary()[0]), 0).items()}
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        write_safetensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    _write_json(path, json.loads(path.read_text()) | changes)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
