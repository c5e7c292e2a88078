"""The hash of what a deployment file effectively says: did anything change that a measurement depends on?

Defaults are filled in; comments, order of keys, and what touches neither answers nor speed are left out: where the door
is, who may pass it, how deaths are handled. A model file enters with its size and its first and last MiB, which hold
the header and the last tensor: hashing a 70B file takes minutes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import orjson

from llamarack.config import Deployment, plain

_END_BYTES = 1024**2
_DOOR = ("host", "port", "api_keys_file", "insecure", "tls_cert", "tls_key")


def deployment_sha256(deployment: Deployment) -> str:
    """Reads the ends of the model files. Raises OSError."""
    value = plain(deployment, leave_out={"supervise"})
    for name in _DOOR:
        value["gateway"].pop(name)
    for model in value["models"]:
        model.pop("on_out_of_memory")  # what is done then, not what runs now
    files = {str(path): quick_sha256(_parts(path)) for path in _paths(deployment)}
    return hashlib.sha256(orjson.dumps([value, files], option=orjson.OPT_SORT_KEYS)).hexdigest()


def quick_sha256(files: Sequence[Path]) -> str:
    """Of names, sizes and ends. Raises OSError."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size} ".encode())
            digest.update(file.read(_END_BYTES))
            file.seek(max(0, size - _END_BYTES))
            digest.update(file.read(_END_BYTES))
    return digest.hexdigest()


def _paths(deployment: Deployment) -> list[Path]:
    paths = [model.path_of(group) for model in deployment.models for group in model.groups]
    paths += [model.tokenizer for model in deployment.models if model.tokenizer is not None]
    return sorted(set(paths))


def _parts(path: Path) -> list[Path]:
    return sorted(part for part in path.iterdir() if part.is_file()) if path.is_dir() else [path]
