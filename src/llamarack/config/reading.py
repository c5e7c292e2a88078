"""Reads a deployment file: YAML with the line of every key, then the models, then the paths in it. Asks no engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llamarack.config.faults import explained
from llamarack.config.models import validated
from llamarack.config.paths import require_paths, resolved
from llamarack.config.records import SCHEMA_VERSION, Deployment
from llamarack.errors import ConfigError
from llamarack.yaml_text import parse_yaml, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDeployment:
    """A validated file. `lines`: key path such as `models[0].path` -> line in `source`; keys not there are defaults."""

    deployment: Deployment
    source: Path | None
    lines: dict[str, int]

    def origin(self, key: str) -> str:
        """`rack.yaml:7` or `default`."""
        if key not in self.lines:
            return "default"
        return f"{self.source.name if self.source else 'input'}:{self.lines[key]}"


def load(path: Path) -> LoadedDeployment:
    """Read and validate a deployment file; relative paths in it are relative to its folder.

    Raises ConfigError naming the key, the line, the given value and what to type.
    """
    if not path.exists():
        raise ConfigError(f"deployment file `{path}` is not there", hint="llamarack plan MODEL -o rack.yaml writes one")
    text = read_text(path, "deployment file")
    loaded = parse(text, source=path)
    require_paths(loaded.deployment, loaded.source, loaded.lines)
    return loaded


def parse(text: str, *, source: Path | None = None) -> LoadedDeployment:
    """The same from text, without looking whether the paths in it exist."""
    where = str(source) if source else "deployment"
    parsed = parse_yaml(text, where)
    return _validated(parsed.value, where, source, parsed.lines)


def from_value(value: dict[str, Any]) -> Deployment:
    """The deployment that a program put together, with every check of a file. Raises ConfigError."""
    return _validated(value, "deployment", None, {}).deployment


def _validated(value: Any, where: str, source: Path | None, lines: dict[str, int]) -> LoadedDeployment:
    if not isinstance(value, dict):
        raise ConfigError(
            f"`{where}` holds no mapping", hint="start with `schema_version: 1` and `models:`; see llamarack schema"
        )
    value.setdefault("schema_version", SCHEMA_VERSION)
    version = value["schema_version"]
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"schema_version: this llamarack reads version {SCHEMA_VERSION}, `{version}` given",
            hint="install the llamarack that wrote the file, or change the version after reading CHANGELOG.md",
        )
    try:
        deployment = validated(Deployment, value)
    except ValidationError as error:
        raise explained(error, where, lines) from None
    return LoadedDeployment(
        deployment=resolved(deployment, source.parent if source else None), source=source, lines=lines
    )
