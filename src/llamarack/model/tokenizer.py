"""Who is this tokenizer? One identity for GGUF metadata, tokenizer.json and tokenizer.model alike.

The canonical form is the list of pieces in id order, each as 8 bytes of little-endian length and UTF-8 text, which is
how GGUF stores `tokenizer.ggml.tokens`. Ids that nobody defined read `[PAD<id>]`, as llama.cpp's converter writes
them, and such fillers at the end are left out: they pad the embedding, not the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from llamarack.errors import ModelError
from llamarack.model.gguf_header import StringArray, Value
from llamarack.model.spec import TokenizerIdentity


class Family(NamedTuple):
    """Known tokenizers, from `data/tokenizers.json`."""

    name: str
    vocab_size: int
    kind: str
    pre: tuple[str, ...]
    sha256: str | None
    file_sha256: tuple[str, ...]
    bos_id: int
    eos_ids: tuple[int, ...]
    add_bos: bool
    shapes: tuple[tuple[int, ...], ...]  # hidden size, feed-forward size, layers


@cache
def families() -> tuple[Family, ...]:
    rows = json.loads(resources.files("llamarack.model").joinpath("data/tokenizers.json").read_text("utf-8"))
    return tuple(
        Family(
            name=row["name"],
            vocab_size=row["vocab_size"],
            kind=row["kind"],
            pre=tuple(row["pre"]),
            sha256=row["sha256"],
            file_sha256=tuple(row["file_sha256"]),
            bos_id=row["bos_id"],
            eos_ids=tuple(row["eos_ids"]),
            add_bos=row["add_bos"],
            shapes=tuple(tuple(shape) for shape in row["shapes"]),
        )
        for row in rows["families"]
    )


def family_of(sha256: str | None, file_sha256: Iterable[str] = ()) -> Family | None:
    """The family that has this canonical hash, or one of these file hashes."""
    files = set(file_sha256)
    for family in families():
        if (sha256 is not None and family.sha256 == sha256) or files & set(family.file_sha256):
            return family
    return None


def canonical_bytes(pieces: Iterable[str]) -> bytes:
    parts = []
    for piece in pieces:
        text = piece.encode("utf-8", "replace")
        parts += [len(text).to_bytes(8, "little"), text]
    return b"".join(parts)


def filler(token_id: int) -> str:
    return f"[PAD{token_id}]"


def gguf_identity(path: Path, metadata: dict[str, Value]) -> TokenizerIdentity:
    """Raises ModelError where lists that must be as long as each other are not."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    tokens = metadata.get("tokenizer.ggml.tokens")
    sha256 = vocab_size = None
    if isinstance(tokens, StringArray):
        for key in ("scores", "token_type"):
            other = metadata.get(f"tokenizer.ggml.{key}")
            if other is not None and (isinstance(other, (int, float, str)) or len(other) != len(tokens)):
                raise ModelError(
                    f"`{path}`: `tokenizer.ggml.{key}` is not a list of {len(tokens):,}, one for each token",
                    hint="convert the model again from its source",
                )
        vocab_size = len(tokens)
        while vocab_size and tokens[vocab_size - 1] == filler(vocab_size - 1):
            vocab_size -= 1
        sha256 = hashlib.sha256(tokens.head(vocab_size)).hexdigest()
    family = family_of(sha256)
    return TokenizerIdentity(
        kind=kind if isinstance(kind, str) else None,
        pre=pre if isinstance(pre, str) else None,
        vocab_size=vocab_size,
        sha256=sha256,
        bos_id=_id(metadata, "bos_token_id"),
        eos_id=_id(metadata, "eos_token_id"),
        pad_id=_id(metadata, "padding_token_id"),
        unk_id=_id(metadata, "unknown_token_id"),
        add_bos=_flag(metadata, "add_bos_token"),
        add_eos=_flag(metadata, "add_eos_token"),
        known_as=family.name if family else None,
    )


def _id(metadata: dict[str, Value], key: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
    return int(value) if is_id and isinstance(value, int) else None  # converters write 2**32 - 1 for "none"


def _flag(metadata: dict[str, Value], key: str) -> bool | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, bool) else None
