"""Files that a command writes for people, who edit them: whole or not at all, and what was there before is kept."""

from __future__ import annotations

import os
from pathlib import Path

from llamarack.errors import UsageError


def write_kept(path: Path, text: str) -> Path | None:
    """Puts `text` at `path` in one step. What stood there and differs is kept beside it; its new path, or None.

    Raises UsageError for a folder, or a folder that is not there; OSError as the system gives.
    """
    require_folder_of(path)
    if path.is_dir():
        raise UsageError(f"`{path}` is a folder", hint=f"name a file: {path / 'rack.yaml'}")
    former = None
    if path.is_file() and path.read_bytes() != text.encode():
        former = path.with_name(path.name + ".bak")
        os.replace(path, former)
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError:  # a full disk leaves what was there
        fresh.unlink(missing_ok=True)
        if former is not None:
            os.replace(former, path)
        raise
    return former


def require_folder_of(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"`{path}` cannot be written: its folder is not there", hint=f"mkdir -p {folder}")
