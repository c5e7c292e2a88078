"""Copies of a Hugging Face model folder, each with one fault that happens in the field."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4}


def _copied(source: Path, target: Path, *changed: str) -> Path:
    """Files that stay as they are become hard links."""
    target.mkdir()
    for file in source.iterdir():
        if file.name in changed:
            shutil.copyfile(file, target / file.name)
        else:
            _linked(file, target / file.name)
    return target


def _linked(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # another file system
        shutil.copyfile(file, target)


def _edit_json(path: Path, edit: Any) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def _rows(path: Path, name: str) -> np.ndarray:
    """A matrix of bytes, one row of values each; writing to it writes to the file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensor = json.loads(file.read(length))[name]
    start, _ = tensor["data_offsets"]
    rows, columns = tensor["shape"]
    shape = (rows, columns * _ITEM_BYTES[tensor["dtype"]])
    return np.memmap(path, dtype=np.uint8, mode="r+", offset=8 + length + start, shape=shape)


def in_bfloat16(source: Path, target: Path) -> Path:
    """The same weights, 16-bit floats cut to bfloat16."""
    copy = _copied(source, target, "model.safetensors")
    file = copy / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F16":
            entry["dtype"] = "BF16"
            place = slice(*entry["data_offsets"])
            data[place] = (np.frombuffer(data[place], "<f2").astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return copy


def with_chat_template(source: Path, target: Path, template: str) -> Path:
    """In the file of its own where there is one, since engines prefer that."""
    own = "chat_template.jinja"
    if (source / own).exists():
        copy = _copied(source, target, own)
        (copy / own).write_text(template)
        return copy
    copy = _copied(source, target, "tokenizer_config.json")
    _edit_json(copy / "tokenizer_config.json", lambda settings: settings.update(chat_template=template))
    return copy


def with_heads_swapped(source: Path, target: Path, *, heads: tuple[int, int], layers: tuple[int, ...]) -> Path:
    copy = _copied(source, target, "model.safetensors")
    count = json.loads((source / "config.json").read_text())["num_attention_heads"]
    for layer in layers:
        rows = _rows(copy / "model.safetensors", f"model.layers.{layer}.self_attn.q_proj.weight")
        size = rows.shape[0] // count
        a, b = (slice(head * size, (head + 1) * size) for head in heads)
        rows[a], rows[b] = rows[b].copy(), rows[a].copy()
    return copy


def with_slice_zeroed(source: Path, target: Path, *, tensor: str, part: float) -> Path:
    copy = _copied(source, target, "model.safetensors")
    rows = _rows(copy / "model.safetensors", tensor)
    rows[int(len(rows) * (1 - part)) :] = 0
    return copy


def with_rope_base(source: Path, target: Path, base: float) -> Path:
    copy = _copied(source, target, "config.json")

    def edit(config: dict[str, Any]) -> None:
        place = config.get("rope_parameters", config)  # transformers 5 keeps it in a mapping of its own
        place["rope_theta"] = base

    _edit_json(copy / "config.json", edit)
    return copy


def with_tokens_swapped(source: Path, target: Path, *, first: int = 300) -> Path:
    """Pairs of words of one length have each other's number: the vocabulary of another conversion."""
    copy = _copied(source, target, "tokenizer.json")

    def edit(tokenizer: dict[str, Any]) -> None:
        numbers = tokenizer["model"]["vocab"]
        by_length: dict[int, list[str]] = {}
        for word in [word for word, number in numbers.items() if number >= first]:
            by_length.setdefault(len(word), []).append(word)
        for same in by_length.values():
            for a, b in zip(same[::2], same[1::2], strict=False):
                numbers[a], numbers[b] = numbers[b], numbers[a]

    _edit_json(copy / "tokenizer.json", edit)
    return copy
