"""Model files opened for a comparison: what their header says, and each tensor as stored and as numbers.

A GGUF file, or a folder of safetensors with its config.json and tokenizer. Tensors are mapped, not read: only those
that are looked at cost memory, one at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import orjson
from gguf.quants import dequantize

from llamarack.errors import ModelError
from llamarack.judge.diagnosis import CauseCode
from llamarack.model.json_file import read_object
from llamarack.model.read import read_model
from llamarack.model.spec import ModelSpec

Matrix = npt.NDArray[np.float32]
_TOKENIZER_MAX_BYTES = 64 * 1024**2
_LONG_LIST = 16
_PLAIN_TYPES: Mapping[str, npt.DTypeLike] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip
# What a header tells that changes answers: its key, the cause that a difference is, and what people call it.
_GGUF_HEADER = (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One entry of a header. None: the file does not say."""

    key: str
    code: CauseCode
    what: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """`raw`: as stored, any shape. `decoded`: its values, `(rows, the rest)`."""

    type: str
    shape: tuple[int, ...]
    raw: npt.NDArray[Any]
    decoded: Callable[[], Matrix]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """`form`: `gguf` or `safetensors`; tensors are named and laid out alike only within one. `heads`: of queries, of
    keys and values; None: not one number for all layers.
    """

    name: str
    form: str
    header: tuple[Told, ...]
    heads: tuple[int | None, int | None]
    tensors: Mapping[str, StoredTensor]


def open_weights(path: Path) -> WeightFiles | None:
    """None for what is neither. Raises ModelError, OSError."""
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path)
    if (path / "config.json").is_file():
        return _open_folder(path)
    return None


def _open_gguf(path: Path) -> WeightFiles:
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        architecture = reader.fields["general.architecture"].contents()
        field = reader.fields.get(key) or reader.fields.get(f"{architecture}.{key}")
        return None if field is None else _short(field.contents())

    heads = (value("attention.head_count"), value("attention.head_count_kv"))
    return WeightFiles(
        name=path.name,
        form="gguf",
        header=tuple(Told(key=key, code=code, what=what, value=value(key)) for key, code, what in _GGUF_HEADER),
        heads=(_whole(heads[0]), _whole(heads[1])),
        tensors={one.name: _gguf_tensor(one) for one in reader.tensors},
    )


def _gguf_tensor(tensor: Any) -> StoredTensor:
    def decoded() -> Matrix:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return values.reshape(values.shape[0], -1)

    shape = tuple(int(size) for size in tensor.shape)
    return StoredTensor(type=tensor.tensor_type.name, shape=shape, raw=tensor.data, decoded=decoded)


def _open_folder(folder: Path) -> WeightFiles:
    spec = read_model(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in spec.files:
        tensors |= _mapped(file)
    return WeightFiles(
        name=folder.name,
        form="safetensors",
        header=_folder_header(folder, spec),
        heads=(spec.attention_heads[0], spec.kv_heads[0]),
        tensors=tensors,
    )


def _folder_header(folder: Path, spec: ModelSpec) -> tuple[Told, ...]:
    config = read_object(folder / "config.json")
    rotary = config.get("rope_parameters", config.get("rope_scaling"))
    scaling = {k: v for k, v in rotary.items() if k != "rope_theta"} if isinstance(rotary, dict) else None
    tokenizer = folder / "tokenizer.json"
    words = read_object(tokenizer, max_bytes=_TOKENIZER_MAX_BYTES) if tokenizer.is_file() else {}
    merges = words["model"].get("merges") if isinstance(words.get("model"), dict) else None
    rows = (
        ("rope_theta", CauseCode.ROTARY, "the rotary base", spec.rope_freq_base),
        ("rope_scaling", CauseCode.ROTARY, "the rotary scaling", scaling),
        ("num_attention_heads", CauseCode.ATTENTION_HEADS, "the number of heads", spec.attention_heads[0]),
        ("num_key_value_heads", CauseCode.ATTENTION_HEADS, "the number of KV heads", spec.kv_heads[0]),
        ("rms_norm_eps", CauseCode.WEIGHTS, "the epsilon of the norms", config.get("rms_norm_eps")),
        ("pre_tokenizer", CauseCode.TOKENIZER, "the pre-tokenizer", _hashed(words.get("pre_tokenizer"))),
        ("vocab", CauseCode.TOKENIZER, "the vocabulary", spec.tokenizer.sha256 and spec.tokenizer.sha256[:12]),
        ("merges", CauseCode.TOKENIZER, "the merges", _short(merges)),
        ("bos_token", CauseCode.BOS, "the begin-of-sequence token", spec.tokenizer.bos_id),
        ("add_bos_token", CauseCode.BOS, "whether a begin-of-sequence token is added", spec.tokenizer.add_bos),
        ("chat_template", CauseCode.CHAT_TEMPLATE, "the chat template", spec.chat_template),
    )
    return tuple(Told(key=key, code=code, what=what, value=value) for key, code, what, value in rows)


def _mapped(file: Path) -> dict[str, StoredTensor]:
    """Of a file whose header `read_model` has checked already."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(length))
    data = np.memmap(file, dtype=np.uint8, mode="r")[8 + length :]
    return {
        name: _safetensor(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _safetensor(dtype: str, shape: tuple[int, ...], raw: npt.NDArray[Any]) -> StoredTensor:
    def decoded() -> Matrix:
        rows = shape[0] if shape else 1
        if dtype == "BF16":
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif dtype in _PLAIN_TYPES:
            values = raw.view(_PLAIN_TYPES[dtype]).astype(np.float32)
        else:  # a form of few bits: its bytes show where it is empty or moved
            values = raw.astype(np.float32)
        return values.reshape(rows, -1)

    return StoredTensor(type=dtype, shape=shape, raw=raw, decoded=decoded)


def _short(value: Any) -> Any:
    """A long list by its length and hash."""
    if isinstance(value, list) and len(value) > _LONG_LIST:
        return f"{len(value)} entries, hash {hashlib.sha256(chr(0).join(map(str, value)).encode()).hexdigest()[:12]}"
    return value


def _hashed(value: Any) -> str | None:
    if value is None:
        return None
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def opened_alike(reference: Path, candidate: Path) -> tuple[WeightFiles, WeightFiles] | None:
    """None where they cannot be held against each other: another form, or files that cannot be read."""
    try:
        ours, theirs = open_weights(reference), open_weights(candidate)
    except (ModelError, OSError):
        return None  # the engine read them; the verdict stands without the files
    if ours is None or theirs is None or ours.form != theirs.form:
        return None
    return ours, theirs
