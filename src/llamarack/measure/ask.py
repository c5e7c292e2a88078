"""One question through an endpoint, timed: what `demo` shows. Not a measurement: `bench` is."""

from __future__ import annotations

import time
from dataclasses import dataclass

import aiohttp
import orjson

from llamarack.errors import EngineError

_MAX_TOKENS = 128
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAnswer:
    """`tokens_per_s`: after the first token; None for an answer of one token. `tokens`: as the engine counts."""

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
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            return await _stream(session, f"{base_url}/v1/chat/completions", body)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(f"the first question was not answered: {error or type(error).__name__}") from error


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> FirstAnswer:
    started = time.monotonic()
    first = last = None
    text, tokens = "", None
    async with session.post(url, data=orjson.dumps(body), headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            raise EngineError(f"the first question was answered with {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            chunk = orjson.loads(line[6:])
            if "error" in chunk:
                raise EngineError(f"the first answer broke off: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    first, last = first or now, now
                    text += piece
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    if first is None or last is None:
        raise EngineError("the first answer was empty")
    rate = (tokens - 1) / (last - first) if tokens and tokens > 1 and last > first else None
    return FirstAnswer(text=text.strip(), first_token_s=first - started, tokens_per_s=rate, tokens=tokens)
