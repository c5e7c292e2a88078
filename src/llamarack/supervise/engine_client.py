"""The supervisor's own requests to an engine: is it up, one answer, its counters. Never carries user traffic."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from llamarack.engine.adaptor import Endpoint


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
        path = endpoint.socket
        connector = aiohttp.UnixConnector(path=str(path)) if path else aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, headers={"Authorization": f"Bearer {endpoint.key}"}, trust_env=False
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._session.close()

    async def is_up(self, timeout_s: float = 2.0) -> bool:
        """Whether /health answers 200."""
        try:
            async with self._session.get(f"{self._endpoint.base_url}/health", timeout=_limit(timeout_s)) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def metrics(self, *, timeout_s: float) -> str:
        """The text of the engine's own /metrics."""
        try:
            async with self._session.get(f"{self._endpoint.base_url}/metrics", timeout=_limit(timeout_s)) as response:
                status, text = response.status, await response.text(errors="replace")
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error)) from error
        if status != 200:
            raise EngineRefused(status, text)
        return text

    async def chat(
        self, messages: list[dict[str, str]], *, max_tokens: int, timeout_s: float, **options: Any
    ) -> Answer:
        return await self._post("/v1/chat/completions", {"messages": messages, **options}, max_tokens, timeout_s)

    async def complete(self, prompt: str, *, max_tokens: int, timeout_s: float, **options: Any) -> Answer:
        return await self._post("/v1/completions", {"prompt": prompt, **options}, max_tokens, timeout_s)

    async def _post(self, path: str, body: dict[str, Any], max_tokens: int, timeout_s: float) -> Answer:
        data = orjson.dumps({"model": self._endpoint.served_name, "max_tokens": max_tokens, **body})
        try:
            async with self._session.post(
                f"{self._endpoint.base_url}{path}",
                data=data,
                headers={"Content-Type": "application/json"},
                timeout=_limit(timeout_s),
            ) as response:
                status, raw = response.status, await response.read()
        except aiohttp.ClientError as error:  # not an OSError by class: the engine may just have been killed
            raise ConnectionError(str(error)) from error
        if status != 200:
            raise EngineRefused(status, raw.decode(errors="replace"))
        return _answer(raw)


def _limit(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


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
