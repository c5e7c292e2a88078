"""Gathers what `identity.judge` needs from the files: the model's own tokenizer, or another one named for it."""

from __future__ import annotations

from pathlib import Path

from llamarack.errors import ModelError
from llamarack.hardware.finding import Finding
from llamarack.model.gguf_header import MAGIC, StringArray, read_header
from llamarack.model.identity import Evidence, judge
from llamarack.model.sentencepiece import read_pieces
from llamarack.model.spec import ModelFormat, ModelSpec
from llamarack.model.tokenizer import gguf_identity
from llamarack.model.tokenizer_files import TOKENIZER_JSON, TOKENIZER_MODEL, read_tokenizer


def check_identity(spec: ModelSpec, tokenizer: Path | None = None) -> tuple[Finding, ...]:
    """`tokenizer`: a folder, a tokenizer file or a GGUF to use in place of the model's own.

    Raises ModelError where the tokenizer's files cannot be read; what they say wrongly is a finding.
    """
    path = tokenizer or spec.path
    try:
        if path.is_file() and path.suffix != ".json" and _is_gguf(path):
            return judge(_from_gguf(spec, path, own=tokenizer is None))
        folder = path if path.is_dir() else path.parent
        if not path.exists():
            raise ModelError(f"tokenizer `{path}` does not exist", hint="name a folder with tokenizer.json")
        return judge(_from_folder(spec, folder, own=tokenizer is None))
    except OSError as error:
        raise ModelError(
            f"`{error.filename or path}` cannot be read: {error.strerror or error}",
            hint=f"see who may read it: `ls -lL {path}`",
        ) from error


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _from_gguf(spec: ModelSpec, path: Path, *, own: bool) -> Evidence:
    metadata = read_header(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    template = metadata.get("tokenizer.chat_template")
    return Evidence(
        spec=spec,
        tokenizer=gguf_identity(path, metadata),
        subject=str(path),
        is_gguf=True,
        pieces=tokens if isinstance(tokens, StringArray) else (),
        chat_template=template if isinstance(template, str) else None if own else spec.chat_template,
    )


def _from_folder(spec: ModelSpec, folder: Path, *, own: bool) -> Evidence:
    files = read_tokenizer(folder)
    second = None
    if (folder / TOKENIZER_JSON).is_file() and (folder / TOKENIZER_MODEL).is_file():
        second = read_pieces(folder / TOKENIZER_MODEL)
    identity = spec.tokenizer if own and spec.format == ModelFormat.SAFETENSORS else files.identity
    return Evidence(
        spec=spec,
        tokenizer=identity,
        subject=str(folder),
        is_gguf=False,
        pieces=frozenset(files.pieces),
        chat_template=files.chat_template or spec.chat_template,
        first=files.pieces,
        second=tuple(second) if second is not None else None,
    )
