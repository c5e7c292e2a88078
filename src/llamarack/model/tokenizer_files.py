"""What do the tokenizer files of a Hugging Face folder say? tokenizer.json, tokenizer.model, tokenizer_config.json.

The pieces are those of tokenizer.json where there is one (engines prefer it), else those of tokenizer.model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarack.errors import ModelError
from llamarack.model.json_file import CONFIG_MAX_BYTES, DAMAGED, read_object
from llamarack.model.sentencepiece import MAX_PIECES, read_pieces
from llamarack.model.spec import TokenizerIdentity
from llamarack.model.tokenizer import canonical_bytes, family_of, filler

TOKENIZER_JSON, TOKENIZER_MODEL = "tokenizer.json", "tokenizer.model"
JSON_MAX_BYTES = 64 * 1024**2  # LLaMA-3's has 9 MB, the largest known 35 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What the tokenizer's files of a folder say together."""

    identity: TokenizerIdentity
    pieces: tuple[str, ...]
    chat_template: str | None


def read_tokenizer(folder: Path, model_config: Mapping[str, Any] | None = None) -> TokenizerFiles:
    """`model_config`: config.json of the model, for special ids the tokenizer leaves out. No files give no identity."""
    settings = _optional_object(folder / "tokenizer_config.json")
    definition = _optional_object(folder / TOKENIZER_JSON, max_bytes=JSON_MAX_BYTES)
    pieces = json_pieces(folder / TOKENIZER_JSON, definition) if definition else None
    kind = _kind(definition) if definition else None
    if pieces is None and (folder / TOKENIZER_MODEL).is_file():
        pieces = read_pieces(folder / TOKENIZER_MODEL)
        kind = "llama" if pieces is not None else None
    hashes = tuple(
        (name, _file_sha256(folder / name)) for name in (TOKENIZER_JSON, TOKENIZER_MODEL) if (folder / name).is_file()
    )
    sha256 = hashlib.sha256(canonical_bytes(pieces)).hexdigest() if pieces else None
    # A known file hash names the family only where there are no pieces to know it by: the two files may disagree.
    family = family_of(sha256, () if pieces else [value for _, value in hashes])
    ids = {piece: number for number, piece in enumerate(pieces or ())}
    config = model_config or {}

    def special(name: str) -> int | None:
        return _special_id(settings.get(f"{name}_token"), ids, config.get(f"{name}_token_id"))

    identity = TokenizerIdentity(
        kind=kind,
        pre=None,
        vocab_size=len(pieces) if pieces else None,
        sha256=sha256,
        file_sha256=hashes,
        bos_id=special("bos"),
        eos_id=special("eos"),
        pad_id=special("pad"),
        unk_id=special("unk"),
        add_bos=_adds(settings.get("add_bos_token"), definition, first=True),
        add_eos=_adds(settings.get("add_eos_token"), definition, first=False),
        known_as=family.name if family else None,
    )
    return TokenizerFiles(identity=identity, pieces=tuple(pieces or ()), chat_template=_template(folder, settings))


def json_pieces(path: Path, definition: Mapping[str, Any]) -> list[str]:
    """Pieces of a tokenizer.json in id order, added tokens included, ids nobody defined as fillers."""
    model = definition.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = definition.get("added_tokens")
    by_id: dict[int, str] = {}
    if isinstance(vocabulary, dict):
        by_id = {number: piece for piece, number in vocabulary.items() if type(number) is int}
    elif isinstance(vocabulary, list):  # Unigram: [[piece, score], ...]
        rows = [row for row in vocabulary if isinstance(row, list) and row and isinstance(row[0], str)]
        by_id = dict(enumerate(row[0] for row in rows))
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int and isinstance(token.get("content"), str):
            by_id[token["id"]] = token["content"]
    if not by_id or min(by_id) < 0 or max(by_id) >= MAX_PIECES:
        raise ModelError(f"`{path}` holds no vocabulary with ids from 0 to {MAX_PIECES:,}", hint=DAMAGED)
    return [by_id.get(number) or filler(number) for number in range(max(by_id) + 1)]


def _optional_object(path: Path, *, max_bytes: int = CONFIG_MAX_BYTES) -> dict[str, Any]:
    return read_object(path, max_bytes=max_bytes) if path.is_file() else {}


def _kind(definition: Mapping[str, Any]) -> str | None:
    """As llama.cpp's converter names it: `llama` where bytes are pieces of their own, `gpt2` for byte-level BPE."""
    model = definition.get("model")
    if not isinstance(model, dict):
        return None
    match model.get("type"):
        case "BPE":
            return "llama" if model.get("byte_fallback") is True else "gpt2"
        case "Unigram":
            return "t5"
        case "WordPiece":
            return "bert"
    return None


def _special_id(token: Any, ids: Mapping[str, int], configured: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str) and text:  # conversions of early 2023 left the texts empty and the ids in config.json
        return ids.get(text)
    first = configured[0] if isinstance(configured, list) and configured else configured
    return first if type(first) is int and 0 <= first < 2**31 else None


def _adds(setting: Any, definition: Mapping[str, Any], *, first: bool) -> bool | None:
    """Whether a special token is put before (or after) the text; tokenizer.json says so in its template."""
    if isinstance(setting, bool):
        return setting
    processor = definition.get("post_processor")
    if not isinstance(processor, dict):
        return None
    inner = processor.get("processors")
    steps = inner if isinstance(inner, list) else [processor]
    for step in steps:
        single = step.get("single") if isinstance(step, dict) else None
        if isinstance(single, list) and single:
            edge = single[0 if first else -1]
            return isinstance(edge, dict) and "SpecialToken" in edge
    return None


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file() and file.stat().st_size <= CONFIG_MAX_BYTES:
        return file.read_text("utf-8", "replace")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {row.get("name"): row.get("template") for row in template if isinstance(row, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
