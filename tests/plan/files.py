"""Model files with headers only: sparse, so that a 70B costs no disk. What the readers and the engine accept."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np

from llamarack.model.spec import ModelSpec
from llamarack.plan.reference import Dimensions, gguf_spec, safetensors_spec


def sparse_gguf(path: Path, size: Dimensions, label: str) -> Path:
    """Metadata and tensor table of `gguf_spec`, data of zeros that the disk does not hold."""
    spec = gguf_spec(size, label)
    writer = gguf.GGUFWriter(path, "llama")
    _metadata(writer, size)
    total = 0
    for tensor in spec.tensors:
        kind = gguf.GGMLQuantizationType[tensor.type]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = list(reversed(tensor.shape))
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            dtype, raw = ("float32" if tensor.type == "F32" else "float16"), None
        else:
            dtype, raw = "uint8", kind
            rows[-1] = rows[-1] // block * block_bytes
        writer.add_tensor_info(tensor.name, rows, np.dtype(dtype), tensor.size_bytes, raw_dtype=raw)
        total += -(-tensor.size_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as file:
        file.truncate(header + total)
    return path


def _metadata(writer: gguf.GGUFWriter, size: Dimensions) -> None:
    writer.add_block_count(size.layers)
    writer.add_embedding_length(size.hidden_size)
    writer.add_feed_forward_length(size.feed_forward_size)
    writer.add_head_count(size.attention_heads)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_key_length(size.head_size)
    writer.add_value_length(size.head_size)
    writer.add_rope_dimension_count(size.head_size)
    writer.add_context_length(size.context_train_tokens)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size.vocab_size)
    writer.add_tokenizer_model("llama")
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words = special + [f"w{index}" for index in range(size.vocab_size - len(special))]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([*kinds, *([gguf.TokenType.NORMAL] * (len(words) - len(kinds)))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def sparse_safetensors(folder: Path, size: Dimensions) -> Path:
    spec: ModelSpec = safetensors_spec(size, "f16")
    folder.mkdir()
    offset, header = 0, {}
    for tensor in spec.tensors:
        end = offset + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.type, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    blob = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(blob)) + blob)
        file.truncate(8 + len(blob) + offset)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden_size,
        "intermediate_size": size.feed_forward_size,
        "num_attention_heads": size.attention_heads,
        "num_key_value_heads": size.kv_heads,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocab_size,
        "max_position_embeddings": size.context_train_tokens,
        "tie_word_embeddings": size.tied_embeddings,
        "torch_dtype": "float16",
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
