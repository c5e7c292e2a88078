"""What two GGUF files differ in, by name and place: for sides whose answers differ and whose files lie here.

Stored bytes are compared first; only tensors that differ are decoded, one at a time. Between two quantisations every
tensor differs a little; what differs by far more than the median tensor is a fault, and is looked into: rows that are
zero, heads in each other's place.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from llamarack.judge.diagnosis import Cause, CauseCode

Matrix = npt.NDArray[np.float32]
# A tensor stands out when its relative error is both: 2-bit quantisations reach 0.3, a swapped head of nine 0.6.
_OUTLIER_ERROR = 0.25
_OUTLIER_TIMES_MEDIAN = 3.0
_DEADLINE_S = 300.0
_SHOWN = 3

_HEADER_CAUSES = (
    ("rope.freq_base", CauseCode.ROTARY, "the rotary base"),
    ("rope.scaling.type", CauseCode.ROTARY, "the rotary scaling"),
    ("rope.scaling.factor", CauseCode.ROTARY, "the rotary scaling factor"),
    ("rope.dimension_count", CauseCode.ROTARY, "the rotated part of a head"),
    ("attention.head_count", CauseCode.ATTENTION_HEADS, "the number of heads"),
    ("attention.head_count_kv", CauseCode.ATTENTION_HEADS, "the number of KV heads"),
    ("attention.layer_norm_rms_epsilon", CauseCode.WEIGHTS, "the epsilon of the norms"),
    ("tokenizer.ggml.model", CauseCode.TOKENIZER, "the kind of tokenizer"),
    ("tokenizer.ggml.pre", CauseCode.TOKENIZER, "the pre-tokenizer"),
    ("tokenizer.ggml.tokens", CauseCode.TOKENIZER, "the vocabulary"),
    ("tokenizer.ggml.merges", CauseCode.TOKENIZER, "the merges"),
    ("tokenizer.ggml.bos_token_id", CauseCode.BOS, "the begin-of-sequence token"),
    ("tokenizer.ggml.add_bos_token", CauseCode.BOS, "whether a begin-of-sequence token is added"),
    ("tokenizer.chat_template", CauseCode.CHAT_TEMPLATE, "the chat template"),
)


def compare_files(reference: Path, candidate: Path) -> tuple[Cause, ...]:
    """Empty where either is no single GGUF file, or where nothing stands out. Blocks; at most some minutes."""
    if any(path.suffix != ".gguf" or not path.is_file() for path in (reference, candidate)):
        return ()
    ours, theirs = gguf.GGUFReader(reference), gguf.GGUFReader(candidate)
    return (*_header_causes(ours, theirs, candidate), *_tensor_causes(ours, theirs, candidate))


def _header_causes(ours: Any, theirs: Any, path: Path) -> list[Cause]:
    causes = []
    for key, code, what in _HEADER_CAUSES:
        a, b = _value(ours, key), _value(theirs, key)
        if a is not None and b is not None and a != b:
            causes.append(
                Cause(
                    code=code,
                    message=f"{what} in the file differs",
                    evidence=f"`{key}`: {_shown(a)} against {_shown(b)} in `{path.name}`",
                    fix=f"take the file from its source again, or convert it with the right `{key}`",
                )
            )
    return causes


def _value(reader: Any, key: str) -> Any:
    architecture = reader.fields["general.architecture"].contents()
    field = reader.fields.get(key) or reader.fields.get(f"{architecture}.{key}")
    if field is None:
        return None
    value = field.contents()
    if isinstance(value, list) and len(value) > 16:
        differing = hashlib.sha256("\0".join(map(str, value)).encode()).hexdigest()[:12]
        return f"{len(value)} entries, hash {differing}"
    return value


def _shown(value: Any) -> str:
    text = " ".join(f"{value:g}".split() if isinstance(value, float) else str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tensor_causes(ours: Any, theirs: Any, path: Path) -> list[Cause]:
    """One cause for each kind of fault, naming the first tensors."""
    other = {tensor.name: tensor for tensor in theirs.tensors}
    errors: dict[str, float] = {}
    until = time.monotonic() + _DEADLINE_S
    for tensor in ours.tensors:
        mate = other.get(tensor.name)
        if mate is None or list(mate.shape) != list(tensor.shape) or time.monotonic() > until:
            continue
        if tensor.tensor_type == mate.tensor_type and np.array_equal(tensor.data, mate.data):
            errors[tensor.name] = 0.0
            continue
        a, b = _decoded(tensor), _decoded(mate)
        errors[tensor.name] = float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-30))
    if not errors:
        return []
    usual = statistics.median(errors.values())
    outliers = [n for n, e in errors.items() if e > max(_OUTLIER_ERROR, _OUTLIER_TIMES_MEDIAN * usual)]
    if usual == 0.0:
        outliers = [name for name, error in errors.items() if error > 0.0]
    heads = (_value(ours, "attention.head_count"), _value(ours, "attention.head_count_kv"))
    mine = {tensor.name: tensor for tensor in ours.tensors}
    found: dict[tuple[CauseCode, str], list[str]] = {}
    for name in outliers:
        code, what, where = _look_into(name, _decoded(mine[name]), _decoded(other[name]), heads)
        found.setdefault((code, what), []).append(f"{name}{where} (relative error {errors[name]:.2g})")
    return [
        Cause(
            code=code,
            message=what,
            evidence=f"`{path.name}`: {'; '.join(names[:_SHOWN])}"
            + (f"; and {len(names) - _SHOWN} tensors more" if len(names) > _SHOWN else "")
            + f"; the median tensor differs by {usual:.2g}",
            fix="compare the file's SHA-256 with its source and copy it again",
        )
        for (code, what), names in found.items()
    ]


def _decoded(tensor: Any) -> Matrix:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return values.reshape(values.shape[0], -1)


def _look_into(name: str, a: Matrix, b: Matrix, heads: tuple[Any, Any]) -> tuple[CauseCode, str, str]:
    empty = ~b.any(axis=1) & a.any(axis=1)
    if empty.any():
        rows = np.flatnonzero(empty)
        return CauseCode.WEIGHTS, "a slice of the weights is zero", f" rows {rows[0]} to {rows[-1]} of {len(a)}"
    columns = ~b.any(axis=0) & a.any(axis=0)
    if columns.any():
        places = np.flatnonzero(columns)
        where = f" columns {places[0]} to {places[-1]} of {a.shape[1]}"
        return CauseCode.WEIGHTS, "a slice of the weights is zero", where
    by_rows = {"attn_q": heads[0], "attn_k": heads[1], "attn_v": heads[1]}
    kind = name.split(".")[-2] if "." in name else name
    count = by_rows.get(kind, heads[0] if kind == "attn_output" else None)
    if isinstance(count, int):
        x, y = (a, b) if kind in by_rows else (a.T, b.T)
        if len(x) % count == 0 and (moved := _moved_heads(x, y, count)):
            pairs = ", ".join(f"{theirs} holds the reference's {ours}" for theirs, ours in moved[:4])
            return CauseCode.ATTENTION_HEADS, "attention heads are in each other's place", f" head {pairs}"
    rows = np.flatnonzero(np.linalg.norm(a - b, axis=1) > _OUTLIER_ERROR * np.linalg.norm(a, axis=1))
    where = f" rows {rows[0]} to {rows[-1]} of {len(a)}" if len(rows) else ""
    return CauseCode.WEIGHTS, "weights differ", where


def _moved_heads(a: Matrix, b: Matrix, count: int) -> list[tuple[int, int]]:
    """(place in b, place in a) of heads that are found whole in another place."""
    ours = a.reshape(count, -1)
    moved = []
    for place, head in enumerate(b.reshape(count, -1)):
        errors = np.linalg.norm(ours - head, axis=1) / np.maximum(np.linalg.norm(ours, axis=1), 1e-30)
        best = int(errors.argmin())
        if best != place and errors[best] < _OUTLIER_ERROR < errors[place]:
            moved.append((place, best))
    return moved
