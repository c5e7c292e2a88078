"""Copies of a GGUF file, each with one fault that happens in the field, or of another quantisation."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize


def _edited(source: Path, target: Path) -> gguf.GGUFReader:
    shutil.copyfile(source, target)
    return gguf.GGUFReader(target, "r+")


def _tensor(reader: gguf.GGUFReader, name: str) -> np.ndarray:
    """Rows of stored bytes or values; writing to it writes to the file."""
    return next(tensor.data for tensor in reader.tensors if tensor.name == name)


def _written(reader: gguf.GGUFReader, target: Path) -> Path:
    reader.data.flush()
    return target


def with_heads_swapped(source: Path, target: Path, *, heads: tuple[int, int], layers: tuple[int, ...]) -> Path:
    """Query heads of these layers in each other's place, as a rank that holds the wrong shard would have them."""
    reader = _edited(source, target)
    count = int(reader.fields["llama.attention.head_count"].contents())
    for layer in layers:
        rows = _tensor(reader, f"blk.{layer}.attn_q.weight")
        size = rows.shape[0] // count
        a, b = (slice(head * size, (head + 1) * size) for head in heads)
        rows[a], rows[b] = rows[b].copy(), rows[a].copy()
    return _written(reader, target)


def with_slice_zeroed(source: Path, target: Path, *, tensor: str, part: float) -> Path:
    """The last `part` of a matrix's rows is zero, as after a copy that ended early."""
    reader = _edited(source, target)
    rows = _tensor(reader, tensor)
    rows[int(len(rows) * (1 - part)) :] = 0
    return _written(reader, target)


def with_rope_base(source: Path, target: Path, base: float) -> Path:
    reader = _edited(source, target)
    field = reader.fields["llama.rope.freq_base"]
    field.parts[field.data[0]][0] = base
    return _written(reader, target)


def with_tokens_swapped(source: Path, target: Path, *, first: int = 300) -> Path:
    """Pairs of words in each other's place: the vocabulary of another conversion."""
    reader = _edited(source, target)
    field = reader.fields["tokenizer.ggml.tokens"]
    by_length: dict[int, list[int]] = {}
    for index in field.data[first:]:  # behind the marks and the bytes
        by_length.setdefault(len(field.parts[index]), []).append(index)
    for same in by_length.values():
        for a, b in zip(same[::2], same[1::2], strict=False):
            one, other = field.parts[a], field.parts[b]
            kept = one.copy()
            one[:], other[:] = other, kept
    return _written(reader, target)


def requantized(
    source: Path, target: Path, kind: gguf.GGMLQuantizationType, *, through: gguf.GGMLQuantizationType | None = None
) -> Path:
    """The same weights in another type; norms stay as they are. `through`: rounded to this type first, all of them."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    types = gguf.LlamaFileType
    file_type = {"F32": types.ALL_F32, "F16": types.MOSTLY_F16, "Q8_0": types.MOSTLY_Q8_0}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in {"general.architecture", "general.file_type"}:
            continue
        sub = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    writer.add_file_type(file_type.get(kind.name, types.MOSTLY_Q4_0))
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if through is not None:
            values = dequantize(quantize(values, through), through)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
