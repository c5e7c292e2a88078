"""What is this, where a model should be? Names the usual strangers by their first bytes or names, and the way out. Pure
but for looking into the folder.
"""

from __future__ import annotations

from pathlib import Path

from llamarack.errors import ModelError
from llamarack.model.gguf_header import MAGIC

SNIFF_BYTES = 512
_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"ggml", b"ggmf", b"ggjt", b"algg")
_PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_NAME_A_MODEL = "name a GGUF file or a model's folder"
_MAX_NAMED = 5


def stand_in(path: Path, start: bytes) -> ModelError | None:
    """What lies where a file of any format should be because a download or copy of it failed; None for real content."""
    text = start.lstrip().lower()
    if not start:
        return ModelError(f"`{path}` is empty", hint="the download or copy did not happen: do it again")
    if start.startswith(b"version https://git-lfs"):
        return ModelError(
            f"`{path}` is a git-lfs pointer, {path.stat().st_size} bytes that stand for the file",
            hint=f"fetch the files themselves: `git -C {path.parent} lfs pull`",
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return ModelError(
            f"`{path}` is a web page: the download got an error or a login page",
            hint=f"read it: `head -c 500 {path}`; then download the file again",
        )
    if not any(start):
        return ModelError(
            f"`{path}` begins with zeros: space was set aside, the content never came", hint="download or copy it again"
        )
    return None


def foreign_file(path: Path, start: bytes) -> ModelError:
    """`start`: the first SNIFF_BYTES of a file that is not a GGUF."""
    if failed := stand_in(path, start):
        return failed
    if start.startswith(_OLD_GGML):
        return ModelError(
            f"`{path}` is a GGML file of 2023, from before GGUF; llama.cpp no longer reads those",
            hint="get the model as GGUF, or convert it from its source: `convert_hf_to_gguf.py MODEL_DIR`",
        )
    if start.startswith(_PICKLED):
        return ModelError(
            f"`{path}` is a PyTorch or zip file: loading one can run code, and its sizes cannot be read without it",
            hint="use the model's safetensors or GGUF form",
        )
    if start.lstrip().startswith((b"{", b"[")):
        return ModelError(f"`{path}` is JSON, not a model", hint="name a GGUF file or the model's folder")
    return ModelError(
        f"`{path}` is not a model: a GGUF file starts with `{MAGIC.decode()}`, this one with the bytes {_shown(start)}",
        hint=_NAME_A_MODEL,
    )


def foreign_folder(folder: Path) -> ModelError:
    """`folder` has neither a config.json nor a GGUF file."""
    if any(folder.glob("consolidated.*.pth")):
        return ModelError(
            f"`{folder}` is Meta's own download (consolidated.*.pth), which no engine here reads",
            hint="get the same model as safetensors: the repository whose name ends in -hf, such as "
            "meta-llama/Llama-2-13b-chat-hf; docs/sizing.md has the commands",
        )
    inside = _models_inside(folder)
    if inside:
        more = f" and {len(inside) - _MAX_NAMED} more" if len(inside) > _MAX_NAMED else ""
        names = ", ".join(str(found.relative_to(folder)) for found in inside[:_MAX_NAMED])
        return ModelError(f"`{folder}` is not a model; models in it: {names}{more}", hint=f"name one: `{inside[0]}`")
    if any(folder.glob("*.safetensors")):
        return ModelError(
            f"`{folder}` holds safetensors but no config.json", hint="copy or download the model's small files too"
        )
    return ModelError(f"`{folder}` holds neither a config.json nor a GGUF file", hint=_NAME_A_MODEL)


def _models_inside(folder: Path) -> list[Path]:
    """One level down, and where Hugging Face's cache keeps them: `models--meta-llama--NAME/snapshots/REVISION`."""
    patterns = ("*/config.json", "*/*.gguf", "snapshots/*/config.json", "snapshots/*/*.gguf")
    found = (file for pattern in patterns for file in sorted(folder.glob(pattern)))
    return list(dict.fromkeys(file.parent if file.name == "config.json" else file for file in found))


def _shown(start: bytes) -> str:
    return start[:8].hex(" ")
