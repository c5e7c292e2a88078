"""What the command line of a command that starts a rack says, where it says it plainly.

Read before the parser of all commands is imported, which takes as long as the rest of a start. What is not plain (help,
an unknown word, a value that is none) is the parser's to judge. Imported before everything else of a command: it needs
the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DEMO_NAME = "smollm2-135m"
_LONGEST_NAME = 200  # config.Model.name
DEMO_RACK = "demo"
_VALUES = {
    "demo": frozenset({"--replicas", "--port", "--prompt", "--model", "--rack", "--state-dir"}),
    "serve": frozenset({"--host", "--port", "--rack", "--state-dir", "--log-format"}),
}
_FLAGS = {"demo": frozenset({"--once"}), "serve": frozenset[str]()}


class StartWords(NamedTuple):
    """`options`: with their values as they were written; `flags`: those that were given; `target`: what to serve, None
    for `demo`."""

    command: str
    options: Mapping[str, str]
    flags: frozenset[str]
    target: Path | None

    @property
    def rack(self) -> str | None:
        """None: it is called after `stem`."""
        return self.options.get("--rack", DEMO_RACK if self.command == "demo" else None)

    @property
    def stem(self) -> str:
        return self.target.stem if self.target is not None else ""

    @property
    def state_dir(self) -> Path | None:
        folder = self.options.get("--state-dir")
        return None if folder is None else Path(folder)

    def first_model(self) -> str | None:
        """What the first one is called; None where its engine is no worker of ours."""
        if self.target is None:
            model = self.options.get("--model")
            return DEMO_NAME if model is None else called(Path(model))
        return called(self.target) if self.target.suffix == ".gguf" else _first_name(self.target)


def understood(arguments: Sequence[str]) -> StartWords | None:
    """None for a command that starts no rack here, and for words that are not plain."""
    if not arguments or arguments[0] not in _VALUES:
        return None
    command = arguments[0]
    options: dict[str, str] = {}
    flags: set[str] = set()
    rest: list[str] = []
    left = iter(arguments[1:])
    for word in left:
        name, is_joined, value = word.partition("=")
        if name in _VALUES[command]:
            value = value if is_joined else next(left, "")
            if not value:
                return None
            options[name] = value
        elif word in _FLAGS[command]:
            flags.add(word)
        elif word.startswith("-"):
            return None
        else:
            rest.append(word)
    if len(rest) != (command == "serve") or "" in rest:
        return None
    return StartWords(command, options, frozenset(flags), Path(rest[0]) if rest else None)


def called(model: Path) -> str:
    """The name of a model that is served as it is: its file's, with a dash for what no name may hold."""
    import re

    return re.sub(r"[^A-Za-z0-9._:/@-]", "-", model.stem).lstrip("-._:/@")[:_LONGEST_NAME] or "model"


def _first_name(file: Path) -> str | None:
    """Of the first model of a deployment file that names no other engine."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if any(word in text for word in ("vllm", "transformers", "engine_binary")):
        return None
    for line in text.splitlines():
        key, _, value = line.strip().removeprefix("- ").partition(":")
        if key.strip() == "name" and value.strip():
            return value.split(" #")[0].strip().strip("'\"")
    return None
