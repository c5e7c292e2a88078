"""The supervisor's own requests to an engine: is it up, one answer, its counters. Never carries user traffic."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson

from llamarack.engine.dialect import Endpoint
from llamarack.supervise.http_client import Reply, exchange


class EngineRefused(Exception):
    """The engine answered with an error. `status`: HTTP; the text is the engine's own, shortened."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    finish_reason: str | None
    completion_tokens: int | None
    prompt_tokens: int | None


class EngineClient:
    """Requests over the engine's socket, each with its own deadline. Raises OSError, TimeoutError, EngineRefused."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._headers = {"Authorization": f"Bearer {endpoint.key}"}

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Each request has closed its own connection."""

    async def is_up(self, timeout_s: float = 2.0) -> bool:
        """Whether /health answers 200."""
        try:
            return (await self._exchange("GET", "/health", timeout_s)).status == 200
        except (OSError, TimeoutError):
            return False

    async def metrics(self, *, timeout_s: float) -> str:
        """The text of the engine's own /metrics."""
        reply = await self._exchange("GET", "/metrics", timeout_s)
        text = reply.body.decode(errors="replace")
        if reply.status != 200:
            raise EngineRefused(reply.status, text)
        return text

    async def chat(
        self, messages: list[dict[str, str]], *, max_tokens: int, timeout_s: float, **options: Any
    ) -> Answer:
        return await self._post("/v1/chat/completions", {"messages": messages, **options}, max_tokens, timeout_s)

    async def complete(self, prompt: str, *, max_tokens: int, timeout_s: float, **options: Any) -> Answer:
        return await self._post("/v1/completions", {"prompt": prompt, **options}, max_tokens, timeout_s)

    async def _post(self, path: str, body: dict[str, Any], max_tokens: int, timeout_s: float) -> Answer:
        data = orjson.dumps({"model": self._endpoint.served_name, "max_tokens": max_tokens, **body})
        reply = await self._exchange("POST", path, timeout_s, data)
        if reply.status != 200:
            raise EngineRefused(reply.status, reply.body.decode(errors="replace"))
        return _answer(reply.body)

    async def _exchange(self, method: str, path: str, timeout_s: float, body: bytes = b"") -> Reply:
        where = self._endpoint.socket or ("127.0.0.1", self._endpoint.port or 0)
        async with asyncio.timeout(timeout_s):
            return await exchange(where, method, path, headers=self._headers, body=body)


def _answer(raw: bytes) -> Answer:
    """Raises EngineRefused for a 200 that holds no completion."""
    try:
        value = orjson.loads(raw)
        choice = value["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"].get("content")
        usage = value.get("usage") or {}
        return Answer(
            text=text or "",
            finish_reason=choice.get("finish_reason"),
            completion_tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise EngineRefused(200, f"no completion: {raw.decode(errors='replace')}") from None
