"""Which tensors lie in these safetensors files? Headers and the index of a sharded model; never the weights.

Format: 8 bytes of little-endian length, a JSON object of `name: {dtype, shape, data_offsets}`, the data without holes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from llamarack.errors import ModelError
from llamarack.model.foreign import SNIFF_BYTES, stand_in
from llamarack.model.json_file import DAMAGED, parse_object, read_object
from llamarack.model.spec import Tensor

INDEX_NAME = "model.safetensors.index.json"
# A header names about 100 bytes for each tensor; models of 50,000 tensors, in one file, stay below.
MAX_HEADER_BYTES = 8 * 1024**2
MAX_INDEX_BYTES = 16 * 1024**2
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")

# Bits of one element: `Dtype` of the safetensors crate 0.6.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """The tensors of one file, checked against its size. Raises ModelError, or OSError."""
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(SNIFF_BYTES)
        if failed := stand_in(path, start):
            raise failed
        length = int.from_bytes(start[:8], "little")
        if file_bytes < 8 or length > file_bytes - 8:
            raise ModelError(f"`{path}` has {file_bytes:,} bytes, its header alone claims {length:,}", hint=DAMAGED)
        if length > MAX_HEADER_BYTES:
            raise ModelError(
                f"`{path}` claims a header of {length:,} bytes, the bound is {MAX_HEADER_BYTES:,}", hint=DAMAGED
            )
        file.seek(8)
        entries = parse_object(file.read(length), f"{path} (header)")
    tensors, spans = [], []
    for name, entry in entries.items():
        if name != "__metadata__":
            tensor, span = _tensor(path, name, entry)
            tensors.append(tensor)
            spans.append(span)
    _check_spans(path, spans, file_bytes - 8 - length)
    return tuple(tensors)


def _tensor(path: Path, name: str, entry: Any) -> tuple[Tensor, tuple[int, int]]:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise ModelError(
            f"`{path}`: tensor `{name[:100]}` has dtype `{dtype}`, whose size is not known here",
            hint="update llamarack, or convert the model to F16 or BF16",
        )
    if not _are_sizes(shape) or len(shape) > 8 or not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelError(f"`{path}`: tensor `{name[:100]}` has no proper shape and data_offsets", hint=DAMAGED)
    elements = 1
    for size in shape:
        elements = min(elements * size, 2**63)  # bounded: eight factors of 2**64 must not grow
    if offsets[1] - offsets[0] != elements * bits // 8:
        raise ModelError(
            f"`{path}`: tensor `{name[:100]}` of {dtype} {tuple(shape)} lies in {offsets[1] - offsets[0]:,} bytes",
            hint=DAMAGED,
        )
    tensor = Tensor(name=name, shape=tuple(shape), type=str(dtype), size_bytes=offsets[1] - offsets[0])
    return tensor, (offsets[0], offsets[1])


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_spans(path: Path, spans: list[tuple[int, int]], data_bytes: int) -> None:
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ModelError(f"`{path}`: tensors overlap or leave a hole at byte {min(start, end):,}", hint=DAMAGED)
        end = stop
    if end > data_bytes:
        raise ModelError(
            f"`{path}` is cut off: its tensors need {end:,} bytes, it has {data_bytes:,}",
            hint="copy or download the file again and compare its size with the source",
        )
    if end < data_bytes:
        raise ModelError(f"`{path}` has {data_bytes - end:,} bytes after its last tensor", hint=DAMAGED)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files of the folder's model: by its index, else the one file, else a complete numbered set."""
    index = folder / INDEX_NAME
    if index.is_file():
        return tuple(folder / name for name in sorted(set(read_index(index).values())))
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _no_safetensors(folder)
    if len(files) == 1 and not _SHARD.fullmatch(files[0].name):
        return (files[0],)
    return _numbered_set(folder, files)


def read_index(index: Path) -> Mapping[str, str]:
    """Tensor name to file name, every file present. A name that leaves the folder is refused."""
    weight_map = read_object(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"`{index}` has no `weight_map` of tensor to file", hint=DAMAGED)
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"`{index}` names `{name[:100]}`, which is not a safetensors file beside it", hint=DAMAGED)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"`{index}` names {len(names)} files, {len(missing)} of them not there: {', '.join(missing[:5])}",
            hint=f"put all files into `{index.parent}`",
        )
    return weight_map


def _numbered_set(folder: Path, files: list[Path]) -> tuple[Path, ...]:
    matches = [_SHARD.fullmatch(file.name) for file in files]
    sets = {(match["stem"], int(match["count"])) for match in matches if match}
    if len(sets) != 1 or not all(matches):
        raise ModelError(
            f"`{folder}` holds {len(files)} safetensors files, no {INDEX_NAME}: {', '.join(f.name for f in files[:5])}",
            hint=f"restore `{INDEX_NAME}`, or leave one model in the folder",
        )
    count = sets.pop()[1]
    if len(files) != count:
        raise ModelError(
            f"`{folder}` holds {len(files)} of {count} shards", hint="copy or download the missing ones into the folder"
        )
    return tuple(files)


def _no_safetensors(folder: Path) -> ModelError:
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")])
    if pickles:
        return ModelError(
            f"`{folder}` holds its weights as PyTorch files only (`{pickles[0].name}`): loading one can run code, and "
            "its sizes cannot be read without loading",
            hint='convert once, where the source is trusted: `python -c "from transformers import AutoModelForCausalLM '
            f"as M; M.from_pretrained('{folder}', torch_dtype='auto').save_pretrained('{folder}-safetensors')\"`",
        )
    return ModelError(f"`{folder}` holds no weights (*.safetensors)", hint="name a GGUF file or a model's folder")
