"""Reads a deployment file: YAML with the line of every key, then the models, then the paths in it. Asks no engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from llamarack.config.faults import explained
from llamarack.config.models import validated
from llamarack.config.paths import require_paths, resolved
from llamarack.config.records import SCHEMA_VERSION, Deployment
from llamarack.errors import ConfigError


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


class _PositionLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, which YAML parsers silently let win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` is not a word; write it in quotes", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path) -> LoadedDeployment:
    """Read and validate a deployment file; relative paths in it are relative to its folder.

    Raises ConfigError naming the key, the line, the given value and what to type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"deployment file `{path}` is not there", hint="llamarack plan MODEL -o rack.yaml writes one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"deployment file `{path}` cannot be read: {_reason(error)}") from error
    loaded = parse(text, source=path)
    require_paths(loaded.deployment, loaded.source, loaded.lines)
    return loaded


def parse(text: str, *, source: Path | None = None) -> LoadedDeployment:
    """The same from text, without looking whether the paths in it exist."""
    where = str(source) if source else "deployment"
    loader = _PositionLoader(text)
    try:
        node = loader.get_single_node()
        value = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"`{where}`{line}: {error.problem}", hint="check the indentation and quotes there") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"`{where}` is not YAML: {error}") from error
    finally:
        loader.dispose()
    return _validated(value, where, source, dict(_key_lines(node, "")))


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


def _key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
            yield key, key_node.start_mark.line + 1
            yield from _key_lines(value_node, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{prefix}[{index}]", item.start_mark.line + 1
            yield from _key_lines(item, f"{prefix}[{index}]")


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "not UTF-8 text"
