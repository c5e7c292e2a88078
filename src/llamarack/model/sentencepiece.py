"""Which pieces does a tokenizer.model file hold? Reads as much of the SentencePiece protobuf as that takes.

`ModelProto` (sentencepiece_model.proto): field 1 repeats `SentencePiece`, whose field 1 is the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llamarack.errors import ModelError
from llamarack.model.foreign import SNIFF_BYTES, stand_in

MAX_FILE_BYTES = 16 * 1024**2  # LLaMA's has 0.5 MB, the largest known about 5 MB
MAX_PIECES = 1_000_000
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_pieces(path: Path) -> list[str] | None:
    """Texts in id order; None where the file is not SentencePiece (LLaMA-3's tokenizer.model is a tiktoken list)."""
    size_bytes = path.stat().st_size
    if size_bytes > MAX_FILE_BYTES:
        raise ModelError(
            f"`{path}` has {size_bytes:,} bytes, the bound is {MAX_FILE_BYTES:,}", hint="copy or download it again"
        )
    raw = path.read_bytes()[:MAX_FILE_BYTES]
    if failed := stand_in(path, raw[:SNIFF_BYTES]):
        raise failed
    if not raw.startswith(b"\x0a"):  # field 1, length-delimited: the first piece
        return None
    pieces = []
    try:
        for number, start, end in _fields(raw, 0, len(raw)):
            if number == 1:
                pieces.append(_text(raw, start, end))
                if len(pieces) > MAX_PIECES:
                    raise ValueError(f"more than {MAX_PIECES:,} pieces")
    except ValueError as error:
        raise ModelError(
            f"`{path}` is a damaged SentencePiece file: {error}", hint="copy or download it again"
        ) from error
    return pieces


def _text(raw: bytes, start: int, end: int) -> str:
    for number, text_start, text_end in _fields(raw, start, end):
        if number == 1:
            return raw[text_start:text_end].decode("utf-8")
    raise ValueError(f"the piece at byte {start:,} has no text")


def _fields(raw: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, end) of each length-delimited field between the two positions; others are stepped over."""
    while position < end:
        tag, position = _varint(raw, position, end)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(raw, position, end)
            continue
        if kind == _BYTES:
            size, position = _varint(raw, position, end)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind} at byte {position:,}")
        if position + size > end:
            raise ValueError(f"the field at byte {position:,} claims {size:,} bytes, {end - position:,} are left")
        if kind == _BYTES:
            yield tag >> 3, position, position + size
        position += size


def _varint(raw: bytes, position: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            raise ValueError("it is cut off")
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a number at byte {position:,} does not end")
