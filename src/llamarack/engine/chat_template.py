"""A chat template by the name that the deployment file gives: one that comes with this package, or a file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from llamarack.errors import ConfigError

_SPELLINGS = {"llama2": "llama-2", "llama3": "llama-3"}


def known_templates() -> list[str]:
    names = files("llamarack.engine").joinpath("data", "templates").iterdir()
    return sorted(entry.name.removesuffix(".jinja") for entry in names if entry.name.endswith(".jinja"))


def is_known(given: str) -> bool:
    return _SPELLINGS.get(given, given) in known_templates()


def template_text(given: str) -> str:
    """The Jinja text behind a `chat_template`. Raises ConfigError for a name that is neither known nor a file."""
    name = _SPELLINGS.get(given, given)
    if is_known(given):
        return files("llamarack.engine").joinpath("data", "templates", f"{name}.jinja").read_text(encoding="utf-8")
    path = Path(given)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    raise ConfigError(
        f"chat_template: `{given}` is neither a file nor one of {', '.join(known_templates())}",
        hint="chat_template: /path/to/template.jinja",
    )
