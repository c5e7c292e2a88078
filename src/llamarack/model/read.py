"""Any model path -> ModelSpec. Chooses by content; what is no model is named by `foreign`.

A file is a GGUF by its first bytes. A folder is a Hugging Face model by its config.json, else the one GGUF (or split
set) that lies in it.
"""

from __future__ import annotations

from pathlib import Path

from llamarack.errors import ModelError
from llamarack.model.foreign import SNIFF_BYTES, foreign_file, foreign_folder
from llamarack.model.gguf import read_gguf, split_set
from llamarack.model.gguf_header import MAGIC
from llamarack.model.spec import ModelSpec


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
            start = file.read(SNIFF_BYTES)
        if not start.startswith(MAGIC):
            raise foreign_file(path, start)
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
        raise foreign_folder(folder)
    if len(sets) > 1:
        names = sorted(files[0].name for files in sets)
        raise ModelError(
            f"`{folder}` holds {len(sets)} models: {', '.join(names[:5])}", hint=f"name one: `{folder / names[0]}`"
        )
    return read_model(sets.pop()[0])
