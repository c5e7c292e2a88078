"""Writes a real, loadable LLaMA-architecture GGUF: random weights, byte-level vocabulary, a chat template.

The answers are noise; loading, tokenizing, templates, slots, streaming and memory behave like those of a large model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

BOS_ID, EOS_ID, FIRST_BYTE_ID = 1, 2, 3
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MARKS = ["<|im_start|>", "<|im_end|>"]
_PIECES = ["\u2581", "e", "t", "a", "o", "i", "n", "s", "r", "h", "l", "d", "c", "u", "m"]
_PIECES += ["\u2581t", "\u2581a", "he", "in", "er", "\u2581the", "ing", "\u2581and", "\u2581is", "hello", "\u2581hello"]


def vocabulary(words: Sequence[str] = ()) -> tuple[list[str], list[float], list[gguf.TokenType]]:
    """Pieces, scores and types in id order: <unk>, <s>, </s>, 256 bytes, merged pieces, ChatML's marks.

    Each of `words` is one token after a space; so are its beginnings, through which a tokenizer comes to it.
    """
    begun = [f"\u2581{word[:end]}" for word in words for end in range(1, len(word) + 1)]
    merged = list(dict.fromkeys([*_PIECES, *begun]))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *_MARKS]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(merged)
    types += [gguf.TokenType.CONTROL] * len(_MARKS)
    scores = [0.0] * (3 + 256) + [-float(rank) for rank in range(len(merged) + len(_MARKS))]
    return pieces, scores, types


def write_tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 64,
    feed_forward: int = 128,
    context: int = 512,
    seed: int = 0,
    chat_template: str | None = CHATML,
    speaks: bool = False,
    words: Sequence[str] = (),
) -> Path:
    """Writes `path` and returns it. The same arguments give the same bytes; matrices are F16, norms F32.

    `speaks`: merged pieces are far likelier than bytes, so that an answer is readable, as a warm-up demands.
    `words`: see `vocabulary`; prompts of exact length are made of words that are one token.
    """
    pieces, scores, types = vocabulary(words)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny-llama")
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(pieces))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    tensors = tiny_tensors(layers, heads, kv_heads, hidden, feed_forward, len(pieces), seed)
    if speaks:
        is_piece = np.array([kind is gguf.TokenType.NORMAL for kind in types])
        tensors["output.weight"] = (tensors["output.weight"] * np.where(is_piece, 8, 0)[:, None]).astype(np.float16)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tensors(
    layers: int, heads: int, kv_heads: int, hidden: int, feed_forward: int, vocab: int, seed: int
) -> dict[str, np.ndarray]:
    """GGUF tensor names to arrays in numpy order (rows first)."""
    random = np.random.default_rng(seed)
    kv_size = hidden // heads * kv_heads

    def matrix(rows: int, columns: int) -> np.ndarray:
        values: np.ndarray = random.standard_normal((rows, columns)) / columns**0.5
        return values.astype(np.float16)

    ones = np.ones(hidden, dtype=np.float32)
    tensors = {"token_embd.weight": matrix(vocab, hidden)}
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ones,
            f"blk.{layer}.attn_q.weight": matrix(hidden, hidden),
            f"blk.{layer}.attn_k.weight": matrix(kv_size, hidden),
            f"blk.{layer}.attn_v.weight": matrix(kv_size, hidden),
            f"blk.{layer}.attn_output.weight": matrix(hidden, hidden),
            f"blk.{layer}.ffn_norm.weight": ones,
            f"blk.{layer}.ffn_gate.weight": matrix(feed_forward, hidden),
            f"blk.{layer}.ffn_up.weight": matrix(feed_forward, hidden),
            f"blk.{layer}.ffn_down.weight": matrix(hidden, feed_forward),
        }
    tensors |= {"output_norm.weight": ones, "output.weight": matrix(vocab, hidden)}
    return tensors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    print(write_tiny_llama(parser.parse_args().path))
