"""What model is in this GGUF file, or in this split set? Turns checked headers into a ModelSpec.

Key names and defaults follow llama.cpp b11434 (`llama-arch.cpp`, `llama-model.cpp`): `head_count_kv` defaults to
`head_count`, key and value length to `embedding_length / head_count`, a missing output head means a tied one.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from llamarack.errors import ModelError
from llamarack.model.ggml_types import FILE_TYPE_GUESSED, FILE_TYPES
from llamarack.model.gguf_header import GgufHeader, TensorEntry, Value, read_header
from llamarack.model.spec import ModelFormat, ModelSpec, Quantization, Tensor
from llamarack.model.tokenizer import gguf_identity

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS of llama.cpp b11434
MAX_SPLITS = 999
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_LAYER = re.compile(r"blk\.(\d{1,5})\.")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_FLOAT_METHODS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def read_gguf(path: Path) -> ModelSpec:
    """`path`: the file, or any part of a split set; all parts are read. Raises ModelError, or OSError."""
    files = split_set(path)
    headers = [read_header(file) for file in files]
    _check_parts(headers)
    keys = _Keys(files[0], headers[0].metadata)
    entries = [entry for header in headers for entry in header.tensors]
    tensors = {entry.name: entry for entry in entries}
    if len(tensors) != len(entries):
        raise ModelError(f"`{files[0]}`: its parts hold the same tensor twice", hint="copy or download the set again")
    return _specify(files, keys, tensors)


def split_set(path: Path) -> tuple[Path, ...]:
    """All parts of the set that `path` belongs to, in order; `(path,)` for a file that stands alone."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_SPLITS:
        raise ModelError(f"`{path}`: the name counts part {match['number']} of {count}", hint="restore its first name")
    parts = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"`{path}` is one of {count} parts, {len(missing)} of them not there: {', '.join(missing[:5])}",
            hint=f"put all parts into `{path.parent}`",
        )
    return tuple(parts)


def _check_parts(headers: list[GgufHeader]) -> None:
    for number, header in enumerate(headers):
        claimed = header.metadata.get("split.count", 1 if len(headers) == 1 else None)
        if claimed not in (len(headers), 0):  # a set of one may say 0
            raise ModelError(
                f"`{header.path}`: `split.count` is {claimed}, by its name the set has {len(headers)}",
                hint="give the parts the names they came with: `NAME-00001-of-00003.gguf`",
            )
        if len(headers) > 1 and header.metadata.get("split.no") != number:
            raise ModelError(
                f"`{header.path}`: `split.no` is {header.metadata.get('split.no')}, by its name it is {number}",
                hint="a part was renamed or overwritten: copy or download the set again",
            )
    total = headers[0].metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if len(headers) > 1 and total is not None and total != found:
        raise ModelError(
            f"`{headers[0].path}`: the set claims {total} tensors, its parts hold {found}",
            hint="parts of different conversions are mixed: copy or download the set again",
        )


@dataclass(frozen=True, slots=True)
class _Keys:
    """Metadata under `{architecture}.`, with errors that name the key."""

    path: Path
    metadata: dict[str, Value]

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise ModelError(f"`{self.path}`: `general.architecture` is missing", hint="name a model's GGUF file")
        return value

    def get(self, name: str) -> Value | None:
        return self.metadata.get(f"{self.architecture}.{name}")

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, name: str, *, default: int | None = None, bound: int = 2**31 - 1) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= bound:
            seen = "missing" if value is None else f"`{value}`"[:60]
            raise self.error(name, f"is {seen}, not a whole number from 1 to {bound:,}")
        return value

    def per_layer(self, name: str, layers: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """One value for all layers, or an array with one for each (0: this layer has none)."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, array):
            return (self.integer(name),) * layers
        numbers = tuple(int(number) for number in value[: layers + 1]) if value.typecode not in "fd" else ()
        if len(numbers) != layers or not all(0 <= number < 2**31 for number in numbers) or not any(numbers):
            raise self.error(name, f"is an array of {len(value)}, not {layers} whole numbers, one for each layer")
        return numbers

    def error(self, name: str, what: str) -> ModelError:
        return ModelError(
            f"`{self.path}`: `{self.architecture}.{name}` {what}", hint="convert the model again from its source"
        )


def _specify(files: tuple[Path, ...], keys: _Keys, tensors: dict[str, TensorEntry]) -> ModelSpec:
    _check_is_language_model(keys, tensors)
    layers = keys.integer("block_count", bound=MAX_LAYERS)
    hidden_size = keys.integer("embedding_length")
    attention_heads = keys.per_layer("attention.head_count", layers)
    if hidden_size < max(attention_heads):
        raise keys.error("attention.head_count", f"is {max(attention_heads)}, more than the width {hidden_size}")
    head_size = hidden_size // max(attention_heads)
    rope = keys.get("rope.freq_base")
    context = keys.get("context_length")
    stored = tuple(
        Tensor(name=entry.name, shape=entry.shape, type=entry.type, size_bytes=entry.size_bytes)
        for entry in tensors.values()
    )
    return ModelSpec(
        path=files[0],
        files=files,
        format=ModelFormat.GGUF,
        architecture=keys.architecture,
        name=keys.text("general.name"),
        layers=_checked_layers(keys, layers, tensors),
        hidden_size=hidden_size,
        feed_forward_sizes=keys.per_layer("feed_forward_length", layers),
        attention_heads=attention_heads,
        kv_heads=keys.per_layer("attention.head_count_kv", layers, attention_heads),
        head_size_k=keys.integer("attention.key_length", default=head_size),
        head_size_v=keys.integer("attention.value_length", default=head_size),
        vocab_size=_embedding_rows(keys, tensors[_EMBEDDING], hidden_size),
        context_train_tokens=context if isinstance(context, int) and context > 0 else None,
        tied_embeddings=_HEAD not in tensors,
        quantization=_quantization(keys, stored),
        tensors=stored,
        tokenizer=gguf_identity(files[0], keys.metadata),
        chat_template=keys.text("tokenizer.chat_template"),
        rope_freq_base=float(rope) if isinstance(rope, (int, float)) and rope > 0 and math.isfinite(rope) else None,
    )


def _check_is_language_model(keys: _Keys, tensors: dict[str, TensorEntry]) -> None:
    if keys.architecture == "clip" or keys.text("general.type") in ("mmproj", "adapter"):
        what = "a LoRA adapter" if keys.text("general.type") == "adapter" else "an image projector"
        raise ModelError(f"`{keys.path}` is {what}, not a language model", hint="name the model's own GGUF file")
    if _EMBEDDING not in tensors:
        what = "holds only a vocabulary" if not tensors else f"has no `{_EMBEDDING}`"
        raise ModelError(f"`{keys.path}` {what}", hint="name the GGUF file with the weights")


def _checked_layers(keys: _Keys, layers: int, tensors: dict[str, TensorEntry]) -> int:
    found = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    if found != set(range(layers)):
        missing = sorted(set(range(layers)) - found)[:3]
        what = f"has no tensors of layer {missing[0]}" if missing else f"has tensors of layer {max(found)}"
        raise keys.error("block_count", f"is {layers}, but the file {what}")
    return layers


def _embedding_rows(keys: _Keys, embedding: TensorEntry, hidden_size: int) -> int:
    if len(embedding.shape) != 2 or embedding.shape[0] != hidden_size:
        raise keys.error("embedding_length", f"is {hidden_size}, but `{_EMBEDDING}` has the shape {embedding.shape}")
    return embedding.shape[1]


def _quantization(keys: _Keys, tensors: tuple[Tensor, ...]) -> Quantization:
    """The method is that of most bytes; the label is the file's own name for the mixture, where it has one."""
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    bytes_of_type: Counter[str] = Counter()
    for tensor in matrices:
        bytes_of_type[tensor.type] += tensor.size_bytes
    main_type = bytes_of_type.most_common(1)[0][0]
    file_type = keys.metadata.get("general.file_type")
    label = FILE_TYPES.get(file_type & ~FILE_TYPE_GUESSED) if isinstance(file_type, int) else None
    elements = sum(math.prod(tensor.shape) for tensor in matrices)
    return Quantization(
        method=_FLOAT_METHODS.get(main_type, "gguf"),
        label=label or main_type,
        bits=8 * sum(tensor.size_bytes for tensor in matrices) / elements,
        detail=" + ".join(
            f"{name} {100 * size / bytes_of_type.total():.0f}%" for name, size in bytes_of_type.most_common(4)
        ),
    )
