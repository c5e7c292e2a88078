"""Any model path -> ModelSpec. Chooses by content, and names what a foreign file is.

A file is a GGUF by its first bytes. A folder is a Hugging Face model by its config.json, else the one GGUF (or split
set) that lies in it.
"""

from __future__ import annotations

from pathlib import Path

from llamarack.errors import ModelError
from llamarack.model.gguf import read_gguf, split_set
from llamarack.model.gguf_header import MAGIC
from llamarack.model.spec import ModelSpec

_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"ggml", b"ggmf", b"ggjt", b"algg")
_SNIFF_BYTES = 512


def read_model(path: Path) -> ModelSpec:
    """Headers only: a 70B file costs milliseconds. Raises ModelError for whatever is wrong with path or files."""
    try:
        if path.is_dir():
            return _read_folder(path)
        if path.suffix == ".safetensors" or path.name in ("config.json", "model.safetensors.index.json"):
            return _read_folder(path.parent)
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise ModelError(f"`{path}` {what}", hint="name a GGUF file or a model's folder")
        with path.open("rb") as file:
            start = file.read(_SNIFF_BYTES)
        if not start.startswith(MAGIC):
            raise _foreign(path, start)
        return read_gguf(path)
    except OSError as error:
        raise ModelError(
            f"`{error.filename or path}` cannot be read: {error.strerror or error}",
            hint=f"see who may read it: `ls -lL {path}`",
        ) from error


def _read_folder(folder: Path) -> ModelSpec:
    if (folder / "config.json").is_file():
        from llamarack.model.huggingface import read_huggingface  # not for a GGUF file

        return read_huggingface(folder)
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    sets = {split_set(file) for file in files}
    if not sets:
        raise ModelError(
            f"`{folder}` holds neither a config.json nor a GGUF file", hint="name a GGUF file or a model's folder"
        )
    if len(sets) > 1:
        names = sorted(files[0].name for files in sets)
        raise ModelError(
            f"`{folder}` holds {len(sets)} models: {', '.join(names[:5])}", hint=f"name one: `{folder / names[0]}`"
        )
    return read_model(sets.pop()[0])


def _foreign(path: Path, start: bytes) -> ModelError:
    text = start.lstrip().lower()
    if not start:
        return ModelError(f"`{path}` is empty", hint="the download or copy did not happen: do it again")
    if start.startswith(b"version https://git-lfs"):
        return ModelError(
            f"`{path}` is a git-lfs pointer, {path.stat().st_size} bytes that stand for the model",
            hint=f"fetch the model itself: `git -C {path.parent} lfs pull`",
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return ModelError(
            f"`{path}` is a web page, not a model: the download got an error or a login page",
            hint=f"read it: `head -c 500 {path}`; then download the file again",
        )
    if start.startswith(_OLD_GGML):
        return ModelError(
            f"`{path}` is a GGML file of 2023, from before GGUF; llama.cpp no longer reads those",
            hint="get the model as GGUF, or convert it from its source: `convert_hf_to_gguf.py MODEL_DIR`",
        )
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return ModelError(
            f"`{path}` is a PyTorch or zip file: loading one can run code, and its sizes cannot be read without it",
            hint="use the model's safetensors or GGUF form",
        )
    if text.startswith((b"{", b"[")):
        return ModelError(f"`{path}` is JSON, not a model", hint="name a GGUF file or the model's folder")
    if not any(start):
        return ModelError(
            f"`{path}` begins with zeros: space was set aside, the content never came", hint="download or copy it again"
        )
    return ModelError(
        f"`{path}` is not a model: it starts with {start[:8]!r}, a GGUF file with {MAGIC!r}",
        hint="name a GGUF file or a model's folder",
    )
