"""What the documents tell a reader to type: fenced blocks and inline code, as argument lists.

A block without a language is shell; what is none says `text`, `yaml`, ...
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MADE = {"target", "node_modules"}  # what a build of the clients leaves there, with documents of others
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "clients/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    if not _MADE & set(path.relative_to(ROOT).parts)
)
_SHELL = {"", "sh", "bash", "shell", "console"}


@dataclass(frozen=True, slots=True)
class Command:
    """One line that a reader types: `words[0]` is the program."""

    document: str
    line: int
    words: tuple[str, ...]
    is_whole: bool  # a fenced line is typed as it stands, inline code may be a form with placeholders
    text: str = ""  # the line itself, with its pipes and redirections

    def __str__(self) -> str:
        return f"{self.document}:{self.line} {' '.join(self.words)}"


def typed(document: Path) -> Iterator[Command]:
    """Every line of the shell blocks, whatever program it starts."""
    name = str(document.relative_to(ROOT))
    for line, text in _fenced(document):
        words = _typed(text)
        if words:
            yield Command(name, line, words, True, _bare(text))


def commands(document: Path, program: str) -> Iterator[Command]:
    name = str(document.relative_to(ROOT))
    for line, text in _fenced(document):
        words = _typed(text)
        if words and words[0] == program:
            yield Command(name, line, words, True)
    for line, text in _prose(document):
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
            words = _typed(code.replace("\\|", "|"))
            if words and words[0] == program and len(words) > 1:
                yield Command(name, line, words, False)


def blocks(document: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```", document.read_text(encoding="utf-8"), re.S | re.M)


def links(document: Path) -> list[str]:
    """Targets of links to files of the project."""
    found = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    return [target for target in found if not re.match(r"[a-z]+:", target) and not target.startswith("#")]


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub and GitLab name them."""
    found = [line.lstrip("#").strip() for _, line in _prose(document) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def _lines(document: Path) -> Iterator[tuple[int, str, str | None]]:
    """(number, line, language of the block it stands in)."""
    language: str | None = None
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if match := re.match(r"\s*```(\w*)", line):
            language = match[1] if language is None else None
        else:
            yield number, line, language


def _fenced(document: Path) -> Iterator[tuple[int, str]]:
    pending, first = "", 0
    for number, line, language in _lines(document):
        if language not in _SHELL:
            pending = ""
            continue
        first = first if pending else number
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        if _is_open(pending):
            pending += "\n"
            continue
        yield first, pending
        pending = ""


def _is_open(text: str) -> bool:
    """Within quotes, so the next line belongs to it."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _bare(text: str) -> str:
    """Without prompt and comment, in single spaces; what stands in quotes over several lines stays as it is."""
    if "\n" in text:
        return text
    return " ".join(re.sub(r"(^|\s)#.*$", "", text.removeprefix("$ ")).split())


def _prose(document: Path) -> Iterator[tuple[int, str]]:
    for number, line, language in _lines(document):
        if language is None:
            yield number, line


def _typed(text: str) -> tuple[str, ...]:
    """Words of a shell line without prompt, settings before it, comment, redirection and what it is piped into."""
    try:
        words = shlex.split(text.removeprefix("$ "), comments=True)
    except ValueError:
        return ()
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    for index, word in enumerate(words):
        if word in {">", ">>", "|", "&&", "&", ";"} or word.startswith(("2>", ">")):
            return tuple(words[:index])
    return tuple(words)
