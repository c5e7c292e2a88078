"""How many tokens is a prompt, to the server? Finds words that are one token each, so that lengths are exact.

A word is at least one token; so when a text of k further words costs k further tokens, each is exactly one. Texts that
cost more are halved until the words at fault are found. Counters, best first: the `tokenizers` library on a given file,
the server's /tokenize, the usage of a real request of one output token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from llamarack.errors import UsageError
from llamarack.measure.client import Client
from llamarack.measure.prompts import FIRST_WORD
from llamarack.measure.server import Served, probe, request_body

TokenCounter = Callable[[str], Awaitable[int | None]]
MIN_WORDS = 32  # 32 words in 8 places are 10^12 different openings
_TIMEOUT_S = 60.0


async def one_token_words(count: TokenCounter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Raises UsageError where too few words are one token or the counter does not answer."""
    base = await count(FIRST_WORD)
    kept = [] if base is None else await _single(count, base, words)
    if len(kept) < MIN_WORDS:
        raise UsageError(
            f"{len(kept)} of {len(words)} common words are one token to this server; prompts of exact length need "
            f"{MIN_WORDS}",
            hint="--prompts business-en, or --tokenizer tokenizer.json",
        )
    return tuple(kept)


async def _single(count: TokenCounter, base: int, words: tuple[str, ...]) -> list[str]:
    tokens = await count(" ".join((FIRST_WORD, *words)))
    if tokens is None:
        return []
    if tokens == base + len(words):
        return list(words)
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return await _single(count, base, words[:middle]) + await _single(count, base, words[middle:])


def usage_counter(client: Client, served: Served) -> TokenCounter:
    """Counts with the template, as the server bills it."""

    async def count(text: str) -> int | None:
        body = request_body(served, text, output_tokens=1, is_fixed_length=False, is_cache_wanted=True)
        return (await probe(client, served.endpoint, body)).num_prompt_tokens

    return count


def tokenize_counter(client: Client, served: Served) -> TokenCounter:
    """llama.cpp reads `content` and `add_special`, vLLM `prompt` and `add_special_tokens`."""

    async def count(text: str) -> int | None:
        value = {"model": served.model, "content": text, "add_special": False}
        value |= {"prompt": text, "add_special_tokens": False}
        answer = await client.call("POST", "/tokenize", value, timeout_s=_TIMEOUT_S)
        tokens = answer.json() if answer.status == 200 else None
        listed = tokens.get("tokens") if isinstance(tokens, dict) else None
        return len(listed) if isinstance(listed, list) else None

    return count


def file_counter(path: Path) -> TokenCounter:
    from tokenizers import Tokenizer  # a second of import that other runs do not need

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise UsageError(
            f"`--tokenizer {path}` is no tokenizer.json: {error}", hint="the model folder has one"
        ) from error

    async def count(text: str) -> int | None:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


async def choose_counter(client: Client, served: Served, tokenizer: Path | None) -> tuple[str, TokenCounter]:
    """The name is part of the result."""
    if tokenizer is not None:
        return f"tokenizers: {tokenizer.name}", file_counter(tokenizer)
    by_server = tokenize_counter(client, served)
    try:
        if await by_server(FIRST_WORD) is not None:
            return "the server's /tokenize", by_server
    except (OSError, TimeoutError):
        pass  # a server without the path; usage is asked instead
    return "the server's usage", usage_counter(client, served)
