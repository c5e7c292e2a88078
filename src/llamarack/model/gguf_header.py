"""What do the first bytes of a GGUF file say? Metadata and tensor table, with every claim checked against the file.

Nothing here knows what a model is. A count, length or offset is believed only after it was held against a bound, so
that a truncated or hostile file costs no more time and memory than an honest one. Format: ggml `docs/gguf.md`, v2-v3.
"""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from llamarack.errors import ModelError
from llamarack.model.ggml_types import GGML_TYPES

MAGIC = b"GGUF"
# Bounds on what a header may claim. The largest vocabularies in use (262,144 tokens with merges) need about 25 MB and
# 800,000 strings, the largest models about 2,500 tensors.
MAX_HEADER_BYTES = 64 * 1024**2
MAX_STRINGS = 4_000_000
MAX_KEYS = 16_384
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535  # gguf.md
MAX_STRING_BYTES = 1024**2  # a long chat template has 50 kB
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME of llama.cpp b11434, with its end mark
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
MAX_ALIGNMENT_BYTES = 1024**2
DEFAULT_ALIGNMENT_BYTES = 32
_FIRST_READ_BYTES = 1024**2

_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
# Type codes of `array`: numpy would take 0.2 s of every command that reads a model.
_ARRAY_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class StringArray:
    """Strings as they lie in the file: 8 bytes of length, then UTF-8. Decoded only when asked."""

    __slots__ = ("_ends", "raw")

    def __init__(self, raw: bytes, ends: array[int]) -> None:
        self.raw = raw
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return self.raw[start + 8 : self._ends[index]].decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __contains__(self, text: object) -> bool:
        """Without decoding all of them."""
        if not isinstance(text, str):
            return False
        encoded = text.encode("utf-8", "replace")
        needle = len(encoded).to_bytes(8, "little") + encoded
        at = self.raw.find(needle)
        while at >= 0:  # the same bytes may lie within a longer string
            index = bisect_right(self._ends, at)
            if (self._ends[index - 1] if index else 0) == at:
                return True
            at = self.raw.find(needle, at + 1)
        return False

    def head(self, count: int) -> bytes:
        """The bytes of the first `count` strings, lengths included."""
        return self.raw[: self._ends[count - 1]] if count else b""


Numbers: TypeAlias = "array[int] | array[float]"
Value: TypeAlias = "int | float | str | StringArray | Numbers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """`shape`: fastest dimension first, as stored. `offset_bytes`: from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type: str
    size_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """All that stands before the weights of one file."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: tuple[TensorEntry, ...]
    data_start_bytes: int
    file_bytes: int


def read_header(path: Path) -> GgufHeader:
    """Raises ModelError for anything but a whole, little-endian GGUF of version 2 or 3; OSError as the system gives.

    The newest is kept until `forget_headers`, as long as the file stays what it was: a start looks at it several times.
    """
    status = path.stat()
    return _read_header(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


def forget_headers() -> None:
    """Some megabytes each; for a process that lives on."""
    _read_header.cache_clear()


@lru_cache(maxsize=1)
def _read_header(path: Path, _identity: tuple[int, ...]) -> GgufHeader:
    with path.open("rb", buffering=0) as file:
        cursor = _Cursor(path, file.fileno())
        version = _read_version(cursor)
        tensor_count = cursor.count("tensors", MAX_TENSORS)
        key_count = cursor.count("metadata keys", MAX_KEYS)
        metadata = _read_metadata(cursor, key_count)
        alignment = _alignment(cursor, metadata)
        tensors = _read_tensors(cursor, tensor_count, alignment)
        data_start = -(-cursor.position // alignment) * alignment
    for tensor in tensors:
        end = data_start + tensor.offset_bytes + tensor.size_bytes
        if end > cursor.file_bytes:
            raise cursor.error(
                f"tensor `{tensor.name}` ends at byte {end:,}, the file has {cursor.file_bytes:,}: it is cut off",
                "copy or download the file again and compare its size with the source",
            )
    return GgufHeader(
        path=path,
        version=version,
        metadata=metadata,
        tensors=tensors,
        data_start_bytes=data_start,
        file_bytes=cursor.file_bytes,
    )


class _Cursor:
    """Reads forward through a growing copy of the file's beginning; never past its end or MAX_HEADER_BYTES."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.file_bytes = os.fstat(descriptor).st_size
        self.position = 0
        self.strings = 0
        self._descriptor = descriptor
        self._data = b""

    def error(self, what: str, hint: str | None = None) -> ModelError:
        return ModelError(f"`{self.path}`: {what}", hint=hint or "the file is damaged: copy or download it again")

    def need(self, size_bytes: int, what: str) -> bytes:
        """The data, long enough for `size_bytes` from `position` on."""
        end = self.position + size_bytes
        if end <= len(self._data):
            return self._data
        if end > self.file_bytes:
            raise self.error(
                f"{what} at byte {self.position:,} needs {size_bytes:,} bytes, the file ends at {self.file_bytes:,}"
            )
        if end > MAX_HEADER_BYTES:
            raise self.error(f"the header passes {MAX_HEADER_BYTES:,} bytes at {what}, no known model comes near that")
        wanted = min(max(end, 2 * len(self._data), _FIRST_READ_BYTES), MAX_HEADER_BYTES, self.file_bytes)
        parts = [self._data]
        have = len(self._data)
        while have < wanted:
            part = os.pread(self._descriptor, wanted - have, have)
            if not part:
                raise self.error(f"the file shrank to {have:,} bytes while it was read")
            parts.append(part)
            have += len(part)
        self._data = b"".join(parts)
        return self._data

    def scalar(self, layout: struct.Struct, what: str) -> int | float:
        data = self.need(layout.size, what)
        value: int | float = layout.unpack_from(data, self.position)[0]
        self.position += layout.size
        return value

    def integer(self, type_id: int, what: str) -> int:
        return int(self.scalar(_SCALARS[type_id], what))

    def count(self, what: str, bound: int) -> int:
        value = self.integer(10, f"the number of {what}")
        if value > bound:
            raise self.error(f"claims {value:,} {what}, the bound is {bound:,}")
        return value

    def text(self, what: str, bound: int) -> str:
        length = self.integer(10, f"the length of {what}")
        if length > bound:
            raise self.error(f"{what} claims {length:,} bytes, the bound is {bound:,}")
        data = self.need(length, what)
        raw = data[self.position : self.position + length]
        self.position += length
        return raw.decode("utf-8", "replace")

    def string_array(self, count: int, what: str) -> StringArray:
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise self.error(f"claims {self.strings:,} strings up to {what}, the bound is {MAX_STRINGS:,}")
        data = self.need(8 * count, what)  # every string has its length: a false count fails before the loop
        start = position = self.position
        unpack_length = _SCALARS[10].unpack_from
        ends = array("Q")
        append, have = ends.append, len(data)  # a vocabulary has 100,000 strings: every look-up counts
        for _ in range(count):
            after = position + 8
            if after > have:
                self.position = position
                data = self.need(8, what)
                have = len(data)
            after += unpack_length(data, position)[0]
            if after > have:
                self.position = position
                data = self.need(after - position, what)
                have = len(data)
            position = after
            append(position - start)
        self.position = position
        return StringArray(data[start:position], ends)

    def number_array(self, type_id: int, count: int, what: str) -> Numbers:
        values: Numbers = array(_ARRAY_TYPES[type_id])
        size_bytes = count * values.itemsize
        data = self.need(size_bytes, what)
        values.frombytes(data[self.position : self.position + size_bytes])
        self.position += size_bytes
        return values


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.need(4, "the magic number")[:4]
    if magic != MAGIC:
        raise cursor.error(f"starts with {magic!r}, not {MAGIC!r}", "name a GGUF file")
    cursor.position = 4
    version = cursor.integer(4, "the version")
    if version & 0xFFFF == 0 and version:
        raise cursor.error(
            "is a big-endian GGUF", "convert it again on this machine: `convert_hf_to_gguf.py MODEL_DIR`"
        )
    if version not in (2, 3):
        raise cursor.error(
            f"has GGUF version {version}; 2 and 3 can be read", "convert the model again from its source"
        )
    return version


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.text(f"metadata key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"has metadata key `{key[:100]}` twice")
        metadata[key] = _read_value(cursor, f"metadata `{key[:100]}`")
    return metadata


def _read_value(cursor: _Cursor, what: str) -> Value:
    type_id = cursor.integer(4, f"the type of {what}")
    if type_id in _SCALARS:
        return cursor.scalar(_SCALARS[type_id], what)
    if type_id == _STRING:
        return cursor.text(what, MAX_STRING_BYTES)
    if type_id != _ARRAY:
        raise cursor.error(f"{what} has type {type_id}, which GGUF does not know")
    element_type = cursor.integer(4, f"the element type of {what}")
    count = cursor.integer(10, f"the length of {what}")
    if element_type == _STRING:
        return cursor.string_array(count, what)
    if element_type not in _ARRAY_TYPES:  # arrays of arrays among them: llama.cpp refuses those too
        raise cursor.error(f"{what} is an array of type {element_type}, which cannot be read")
    return cursor.number_array(element_type, count, what)


def _alignment(cursor: _Cursor, metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT_BYTES or value & (value - 1):
        raise cursor.error(f"`general.alignment` is not a power of two up to {MAX_ALIGNMENT_BYTES:,}")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> tuple[TensorEntry, ...]:
    tensors: dict[str, TensorEntry] = {}
    expected_offset = 0
    for index in range(count):
        tensor = _read_tensor(cursor, index)
        if tensor.name in tensors:
            raise cursor.error(f"has tensor `{tensor.name}` twice")
        if tensor.offset_bytes != expected_offset:  # llama.cpp demands it, and it rules out overlaps
            raise cursor.error(
                f"tensor `{tensor.name}` lies at offset {tensor.offset_bytes:,}, not behind the last one at "
                f"{expected_offset:,}"
            )
        expected_offset += -(-tensor.size_bytes // alignment) * alignment
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _read_tensor(cursor: _Cursor, index: int) -> TensorEntry:
    name = cursor.text(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
    dimensions = cursor.integer(4, f"the dimensions of tensor `{name}`")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"tensor `{name}` claims {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.integer(10, f"the shape of tensor `{name}`") for _ in range(dimensions))
    type_id = cursor.integer(4, f"the type of tensor `{name}`")
    offset_bytes = cursor.integer(10, f"the offset of tensor `{name}`")
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise cursor.error(
            f"tensor `{name}` has type {type_id}, whose size is not known here",
            "update llamarack, or quantise the model again to a current type: `llama-quantize IN OUT Q4_K_M`",
        )
    elements = 1
    for size in shape:
        elements *= size
        if not 0 < elements < 2**63:
            raise cursor.error(f"tensor `{name}` has the impossible shape {shape}")
    if shape[0] % kind.block_elements:
        raise cursor.error(f"tensor `{name}` has rows of {shape[0]:,}, not a multiple of {kind.block_elements}")
    size_bytes = elements // kind.block_elements * kind.block_bytes
    return TensorEntry(name=name, shape=shape, type=kind.name, size_bytes=size_bytes, offset_bytes=offset_bytes)
