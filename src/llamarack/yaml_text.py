"""YAML that people wrote, read in one way everywhere: the line of every key, no key twice, and no text that hangs us.

Anchors and merge keys (`<<`) work as elsewhere. Not taken over from YAML: dates (`2024-01-01` stays text), aliases that
hold themselves, and texts that grow beyond any file's size when their aliases are followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llamarack.errors import ConfigError

_MOST_NODES = 100_000  # a deployment of 1,000 models has a tenth
_MERGE = "tag:yaml.org,2002:merge"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_HINT = "check the indentation and quotes there"


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlText:
    """`value`: None for an empty text. `lines`: key path such as `models[0].path` -> line, counted from 1."""

    value: Any
    lines: dict[str, int]


def read_text(path: Path, what: str, *, hint: str | None = None) -> str:
    """`what`: `deployment file`. Raises ConfigError, with `hint` where the system refuses the file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{what} `{path}` cannot be read: {error.strerror or error}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} `{path}` cannot be read: not UTF-8 text", hint=hint or "save it as UTF-8, or name another file"
        ) from error


def parse_yaml(text: str, where: str) -> YamlText:
    """`where`: the file's name, for messages. Raises ConfigError with the line."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"`{where}` line {number}: the character U+{int(error.character):04X} is not allowed", hint="delete it"
        ) from None
    try:
        node = loader.get_single_node()
        if node is None:
            return YamlText(value=None, lines={})
        _require_finite(node, where)
        value = loader.construct_document(node)
        return YamlText(value=value, lines=dict(_key_lines(node, "")))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark else ""
        hint = "leave one of them" if "given twice" in str(error.problem) else _HINT
        raise ConfigError(f"`{where}`{line}: {error.problem}", hint=hint) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"`{where}` is not YAML: {' '.join(str(error).split())}", hint=_HINT) from error
    except RecursionError:
        raise ConfigError(f"`{where}` is nested too deeply", hint="check its brackets and indentation") from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, which YAML parsers silently let win. Keys of a merge may be overridden."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own class attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` is not a word; write it in quotes", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _require_finite(root: yaml.Node, where: str) -> None:
    """Aliases let ten lines mean a billion, or a list hold itself: counted before anything is made of them."""
    count = 0

    def visit(node: yaml.Node, inside: frozenset[int]) -> None:
        nonlocal count
        count += 1
        if id(node) in inside:
            raise ConfigError(
                f"`{where}` line {node.start_mark.line + 1}: an alias stands inside what it names",
                hint="write the value out",
            )
        if count > _MOST_NODES:
            raise ConfigError(
                f"`{where}` has more than {_MOST_NODES:,} values, its aliases followed", hint="write the values out"
            )
        inside |= {id(node)}
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                visit(key, inside)
                visit(value, inside)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                visit(item, inside)

    visit(root, frozenset())


def _key_lines(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
            yield key, key_node.start_mark.line + 1
            yield from _key_lines(value_node, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{prefix}[{index}]", item.start_mark.line + 1
            yield from _key_lines(item, f"{prefix}[{index}]")
