"""A small LLaMA of noise, in quantised and 16-bit matrices, on which a build of llama.cpp is proven. Writes a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_LAYERS, _HIDDEN, _FEED_FORWARD, _HEADS = 2, 256, 512, 4
_FIRST_BYTE = 3  # after <unk>, <s>, </s>


def write_probe_model(path: Path) -> Path:
    """Hidden size 256, so that every block size divides it; each matrix type meets another kernel."""
    import gguf
    import numpy as np

    random = np.random.default_rng(0)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [f"w{number}" for number in range(512 - len(pieces))]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256
    types += [gguf.TokenType.NORMAL] * (len(pieces) - len(types))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * len(pieces))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    quantized = gguf.GGMLQuantizationType

    def add(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> None:
        values: np.ndarray = (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        if kind is quantized.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    ones = np.ones(_HIDDEN, dtype=np.float32)
    add("token_embd.weight", len(pieces), _HIDDEN, quantized.F16)
    for layer in range(_LAYERS):
        prefix = f"blk.{layer}"
        writer.add_tensor(f"{prefix}.attn_norm.weight", ones)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{prefix}.{part}.weight", _HIDDEN, _HIDDEN, quantized.Q8_0)
        writer.add_tensor(f"{prefix}.ffn_norm.weight", ones)
        add(f"{prefix}.ffn_gate.weight", _FEED_FORWARD, _HIDDEN, quantized.Q4_0)
        add(f"{prefix}.ffn_up.weight", _FEED_FORWARD, _HIDDEN, quantized.Q4_1)
        add(f"{prefix}.ffn_down.weight", _HIDDEN, _FEED_FORWARD, quantized.Q8_0)
    writer.add_tensor("output_norm.weight", ones)
    add("output.weight", len(pieces), _HIDDEN, quantized.F16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
