"""What is asked: synthetic prompts of an exact number of tokens, or questions from a file. Pure once calibrated.

Each prompt opens with text that no other prompt of any run has (prefix caches match from the left), unless the run
declares that it wants a warm cache. The seed is fresh for every run and recorded: the same seed against the same
server would measure its cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import orjson

from llamarack.errors import UsageError

BUILT_IN = {"business-zh": "business_zh.jsonl", "business-en": "business_en.jsonl"}
FIRST_WORD = "the"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`language`: the one the answer should be in, as ISO 639-1."""

    id: str
    text: str
    language: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """`words`: each exactly one token after a space. `first_word_tokens`: what the server counts for a prompt of
    `FIRST_WORD` alone, template included, so that a prompt has `first_word_tokens` + its further words.
    """

    input_tokens: int
    words: tuple[str, ...]
    first_word_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FromFile:
    """`has_nonce` false: the run wants the server's cache warm."""

    name: str
    questions: tuple[Question, ...]
    seed: int
    has_nonce: bool = True


PromptSource = Synthetic | FromFile


def prompt(source: PromptSource, *, point: int, repeat: int, index: int) -> Question:
    """The prompt of one request; a pure function of its arguments, so workers need not share anything."""
    drawn = random.Random(f"{source.seed}/{point}/{repeat}/{index}")
    if isinstance(source, Synthetic):
        words = drawn.choices(source.words, k=source.input_tokens - source.first_word_tokens)
        return Question(id=f"synthetic-{index}", text=" ".join((FIRST_WORD, *words)))
    question = source.questions[index % len(source.questions)]
    if not source.has_nonce:
        return question
    return Question(id=question.id, text=f"#{drawn.getrandbits(48):012x} {question.text}", language=question.language)


def common_words() -> tuple[str, ...]:
    """Frequent English words: after a space each is one token in nearly every vocabulary. Those that are not in the
    target's are found by calibration and dropped.
    """
    return tuple(resources.files("llamarack.measure").joinpath("data", "words.txt").read_text().split())


def load_questions(name: str) -> tuple[Question, ...]:
    """A built-in set by name, or a file of JSON lines with `prompt` and, if wanted, `id` and `language`."""
    if name in BUILT_IN:
        data = resources.files("llamarack.measure").joinpath("data", BUILT_IN[name]).read_bytes()
    else:
        try:
            data = Path(name).read_bytes()
        except OSError as error:
            sets = ", ".join(BUILT_IN)
            raise UsageError(f"`--prompts {name}`: {error.strerror}", hint=f"a file, or one of {sets}") from error
    lines = [(number, line) for number, line in enumerate(data.splitlines(), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"`--prompts {name}` holds no prompts", hint='one JSON object a line: {"prompt": "..."}')
    return tuple(_question(name, number, line) for number, line in lines)


def _question(name: str, number: int, line: bytes) -> Question:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        value = None
    text = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(text, str) or not text.strip():
        raise UsageError(
            f"`--prompts {name}` line {number}: no `prompt` text", hint='one JSON object a line: {"prompt": "..."}'
        )
    return Question(id=str(value.get("id", f"line-{number}")), text=text, language=value.get("language"))
