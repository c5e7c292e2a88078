"""What was last proved of a rack, and whether it still holds: the proof is of the settings it was made with.

`proofs.json` in the rack's folder; a later proof of the same kind replaces the earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from llamarack.paths import RackPaths, make_private

SCHEMA_VERSION = 1
_NAME = "proofs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`verdict`: as the command said it. `folder`: where its report lies."""

    at_unix_s: float
    deployment_sha256: str
    verdict: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proofs:
    """`by_kind`: `verify`, `bench`, `acceptance`."""

    schema_version: int = SCHEMA_VERSION
    by_kind: Mapping[str, Proof]


def read_proofs(paths: RackPaths) -> Mapping[str, Proof]:
    """Empty where nothing was proved, or the file is of another version."""
    try:
        proofs = TypeAdapter(Proofs).validate_json(_path(paths).read_bytes())
    except (OSError, ValidationError):
        return {}
    return proofs.by_kind if proofs.schema_version == SCHEMA_VERSION else {}


def remember(paths: RackPaths, kind: str, proof: Proof) -> None:
    make_private(paths.folder)
    proofs = replace(Proofs(by_kind={}), by_kind={**read_proofs(paths), kind: proof})
    path = _path(paths)
    partial = path.with_name(f"{_NAME}.partial")
    partial.write_bytes(orjson.dumps(proofs, option=orjson.OPT_INDENT_2))
    partial.replace(path)


def outdated(proofs: Mapping[str, Proof], deployment_sha256: str) -> tuple[str, ...]:
    """Kinds that were proved with other settings."""
    return tuple(kind for kind, proof in proofs.items() if proof.deployment_sha256 != deployment_sha256)


def _path(paths: RackPaths) -> Path:
    return paths.folder / _NAME
