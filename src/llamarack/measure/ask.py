"""One question through an endpoint, timed: what `demo` shows. Not a measurement: `bench` is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

from llamarack.errors import EngineError
from llamarack.supervise.http_client import exchange

_MAX_TOKENS = 128
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAnswer:
    """`tokens_per_s`: after the first; None for one, or for all in one piece. `tokens`: as the engine counts."""

    text: str
    first_token_s: float
    tokens_per_s: float | None
    tokens: int | None


async def ask_once(base_url: str, model: str, prompt: str) -> FirstAnswer:
    """Streams one greedy chat answer. Raises EngineError with what the endpoint said."""
    body = {
        "model": model,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": prompt},
        ],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    seen = _Seen()
    url = urlsplit(base_url)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reply = await exchange(
                (url.hostname or "127.0.0.1", url.port or 80),
                "POST",
                f"{url.path}/v1/chat/completions",
                headers={},
                body=orjson.dumps(body),
                on_data=seen.take,
            )
    except (OSError, TimeoutError) as error:
        raise EngineError(f"the first question was not answered: {error or type(error).__name__}") from error
    if reply.status != 200:
        raise EngineError(
            f"the first question was answered with {reply.status}: {seen.refusal.decode(errors='replace')}"
        )
    return seen.answer()


class _Seen:
    """The stream as it comes, timed from now."""

    def __init__(self) -> None:
        self.refusal = b""
        self._started_s = time.monotonic()
        self._rest = b""
        self._text = ""
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._tokens: int | None = None
        self._error: str | None = None

    def take(self, status: int, data: bytes) -> None:
        if status != 200:
            self.refusal += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        now = time.monotonic()
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            chunk = orjson.loads(line[6:])
            if "error" in chunk:
                self._error = chunk["error"]["message"]
                continue
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    self._first_s, self._last_s = self._first_s or now, now
                    self._text += piece
            self._tokens = (chunk.get("usage") or {}).get("completion_tokens", self._tokens)

    def answer(self) -> FirstAnswer:
        if self._error is not None:
            raise EngineError(f"the first answer broke off: {self._error}")
        if self._first_s is None or self._last_s is None:
            raise EngineError("the first answer was empty")
        tokens, spent_s = self._tokens, self._last_s - self._first_s
        rate = (tokens - 1) / spent_s if tokens and tokens > 1 and spent_s > 0 else None
        return FirstAnswer(
            text=self._text.strip(), first_token_s=self._first_s - self._started_s, tokens_per_s=rate, tokens=tokens
        )
