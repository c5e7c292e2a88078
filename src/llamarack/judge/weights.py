"""What two models' files differ in, by name and place: for sides whose answers differ and whose files lie here.

Stored bytes are compared first; only tensors that differ are decoded, one at a time. Between two quantisations every
tensor differs a little; what differs by far more than the median tensor is a fault, and is looked into: rows that are
zero, heads in each other's place.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from llamarack.judge.diagnosis import Cause, CauseCode
from llamarack.judge.weight_files import Matrix, StoredTensor, WeightFiles, opened_alike

# A tensor stands out when its relative error is both: 2-bit quantisations reach 0.3, a swapped head of nine 0.6.
_OUTLIER_ERROR = 0.25
_OUTLIER_TIMES_MEDIAN = 3.0
_DEADLINE_S = 300.0
_SHOWN = 3
# Matrices whose rows are heads (of queries; of keys and values), and the one whose columns are.
_QUERY_ROWS, _KEY_ROWS = frozenset({"attn_q", "q_proj"}), frozenset({"attn_k", "attn_v", "k_proj", "v_proj"})
_HEAD_COLUMNS = frozenset({"attn_output", "o_proj"})


def compare_files(reference: Path, candidate: Path) -> tuple[Cause, ...]:
    """GGUF against GGUF, or a folder of safetensors against another. Empty for anything else, and where nothing stands
    out. Blocks; at most some minutes.
    """
    opened = opened_alike(reference, candidate)
    if opened is None:
        return ()
    return (*_header_causes(*opened), *_tensor_causes(*opened))


def _header_causes(ours: WeightFiles, theirs: WeightFiles) -> list[Cause]:
    return [
        Cause(
            code=a.code,
            message=f"{a.what} in the file differs",
            evidence=f"`{a.key}`: {_shown(a.value)} against {_shown(b.value)} in `{theirs.name}`",
            fix=f"take the file from its source again, or convert it with the right `{a.key}`",
        )
        for a, b in zip(ours.header, theirs.header, strict=True)
        if a.value is not None and b.value is not None and a.value != b.value
    ]


def _shown(value: Any) -> str:
    text = " ".join(f"{value:g}".split() if isinstance(value, float) else str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tensor_causes(ours: WeightFiles, theirs: WeightFiles) -> list[Cause]:
    """One cause for each kind of fault, naming the first tensors."""
    errors = _relative_errors(ours, theirs)
    if not errors:
        return []
    usual = statistics.median(errors.values())
    outliers = [n for n, e in errors.items() if e > max(_OUTLIER_ERROR, _OUTLIER_TIMES_MEDIAN * usual)]
    if usual == 0.0:
        outliers = [name for name, error in errors.items() if error > 0.0]
    found: dict[tuple[CauseCode, str], list[str]] = {}
    for name in outliers:
        a, b = ours.tensors[name].decoded(), theirs.tensors[name].decoded()
        code, what, where = _look_into(name, a, b, ours.heads)
        found.setdefault((code, what), []).append(f"{name}{where} (relative error {errors[name]:.2g})")
    return [
        Cause(
            code=code,
            message=what,
            evidence=f"`{theirs.name}`: {'; '.join(names[:_SHOWN])}"
            + (f"; and {len(names) - _SHOWN} tensors more" if len(names) > _SHOWN else "")
            + f"; the median tensor differs by {usual:.2g}",
            fix="compare the file's SHA-256 with its source and copy it again",
        )
        for (code, what), names in found.items()
    ]


def _relative_errors(ours: WeightFiles, theirs: WeightFiles) -> dict[str, float]:
    """Of the tensors that both have in one shape, as far as time allows."""
    errors: dict[str, float] = {}
    until = time.monotonic() + _DEADLINE_S
    for name, tensor in ours.tensors.items():
        mate = theirs.tensors.get(name)
        if mate is None or mate.shape != tensor.shape or time.monotonic() > until:
            continue
        errors[name] = 0.0 if _is_stored_alike(tensor, mate) else _relative_error(tensor.decoded(), mate.decoded())
    return errors


def _is_stored_alike(a: StoredTensor, b: StoredTensor) -> bool:
    return a.type == b.type and np.array_equal(a.raw, b.raw)


def _relative_error(a: Matrix, b: Matrix) -> float:
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-30))


def _look_into(name: str, a: Matrix, b: Matrix, heads: tuple[int | None, int | None]) -> tuple[CauseCode, str, str]:
    empty = ~b.any(axis=1) & a.any(axis=1)
    if empty.any():
        rows = np.flatnonzero(empty)
        return CauseCode.WEIGHTS, "a slice of the weights is zero", f" rows {rows[0]} to {rows[-1]} of {len(a)}"
    columns = ~b.any(axis=0) & a.any(axis=0)
    if columns.any():
        places = np.flatnonzero(columns)
        where = f" columns {places[0]} to {places[-1]} of {a.shape[1]}"
        return CauseCode.WEIGHTS, "a slice of the weights is zero", where
    kind = name.split(".")[-2] if name.endswith(".weight") else ""  # packed forms are laid out otherwise
    count = heads[1] if kind in _KEY_ROWS else heads[0] if kind in _QUERY_ROWS | _HEAD_COLUMNS else None
    if count is not None:
        x, y = (a.T, b.T) if kind in _HEAD_COLUMNS else (a, b)
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
