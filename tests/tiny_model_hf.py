"""Writes a LLaMA-architecture model folder that real engines load: random weights, safetensors, a tokenizer of letters.

Heads of 32 elements, the smallest that vLLM's attention on the processor takes; four heads, two KV heads, so that two
ranks can share them and three cannot. The answers are noise of readable characters: a warm-up refuses others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.huggingface_files import huggingface_name, write_safetensors
from tests.tiny_model import CHATML, tiny_tensors

_PIECES = ["<unk>", "<s>", "</s>", "\u2581", *map(chr, range(33, 127)), "\n", "<|im_start|>", "<|im_end|>"]
LAYERS, HEADS, KV_HEADS, HIDDEN, FEED_FORWARD, CONTEXT = 4, 4, 2, 128, 256, 2048
GROUP = 32  # rows of a quantised matrix that share a scale


def write_tiny_hf_llama(folder: Path, *, chat_template: str | None = CHATML, seed: int = 0, **changes: Any) -> Path:
    """Writes `folder` and returns it; `changes` are laid over config.json. The same arguments give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = _PIECES
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float16",
        "hidden_act": "silu",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": len(pieces),
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    _write_json(folder / "config.json", config | changes)
    _write_json(folder / "tokenizer.json", _tokenizer(pieces))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", settings)
    tensors = tiny_tensors(LAYERS, HEADS, KV_HEADS, HIDDEN, FEED_FORWARD, len(pieces), seed)
    write_safetensors(folder / "model.safetensors", {huggingface_name(name): one for name, one in tensors.items()})
    return folder


def write_tiny_quantized(folder: Path, method: str) -> Path:
    """The same model with 4-bit matrices of random codes, in the layout of `gptq` or `awq`."""
    schemes: dict[str, dict[str, Any]] = {
        "gptq": {"desc_act": False, "sym": True},
        "awq": {"zero_point": True, "version": "gemm"},
    }
    settings: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": GROUP, "lm_head": False}
    settings |= schemes[method]
    write_tiny_hf_llama(folder, quantization_config=settings)
    random = np.random.default_rng(1)
    tensors = tiny_tensors(LAYERS, HEADS, KV_HEADS, HIDDEN, FEED_FORWARD, len(_PIECES), 0)
    stored: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        own = huggingface_name(name)
        if ".self_attn." in own or ".mlp." in own:
            stored |= _quantized(own.removesuffix(".weight"), array.shape, method, random)
        else:
            stored[own] = array
    write_safetensors(folder / "model.safetensors", stored)
    return folder


def _quantized(name: str, shape: tuple[int, ...], method: str, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Eight codes to a word, along inputs (gptq) or outputs (awq). Zero points are 8; gptq stores 7."""
    outputs, inputs = shape
    packed = (inputs // 8, outputs) if method == "gptq" else (inputs, outputs // 8)
    zero_word = 0x77777777 if method == "gptq" else -0x77777778  # 0x88888888 as a signed word
    groups = inputs // GROUP
    tensors: dict[str, np.ndarray] = {
        f"{name}.qweight": random.integers(-(2**31), 2**31, packed, dtype=np.int64).astype(np.int32),
        f"{name}.qzeros": np.full((groups, outputs // 8), zero_word, dtype=np.int32),
        # Codes are spread over -8 to 7, with a deviation of 4.6; full-precision weights have one of 1/sqrt(inputs).
        f"{name}.scales": np.full((groups, outputs), 1 / (4.6 * inputs**0.5), dtype=np.float16),
    }
    if method == "gptq":
        tensors[f"{name}.g_idx"] = (np.arange(inputs) // GROUP).astype(np.int32)
    return tensors


def _tokenizer(pieces: list[str]) -> dict[str, Any]:
    """BPE without merges: every text becomes its characters."""
    special = [0, 1, 2, len(pieces) - 2, len(pieces) - 1]
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": pieces[number], **marks} for number in special],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": False,
            "vocab": {piece: number for number, piece in enumerate(pieces)},
            "merges": [],
        },
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(write_tiny_hf_llama(parser.parse_args().folder))
