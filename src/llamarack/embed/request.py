"""What goes into the library and what comes out: OpenAI-shaped dictionaries, as llama.cpp's server reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llamarack.errors import BadRequest, ContextLengthExceeded, UpstreamFailed

Kind = Literal["chat", "complete"]
Chunk = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`finish_reason`: `stop` (the model ended) or `length` (max_tokens or the context is full)."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    body: dict[str, Any]
    wait_s: float
    timeout_s: float

    @staticmethod
    def of(request: dict[str, Any], options: dict[str, Any]) -> Request:
        rest = dict(options)
        wait_s, timeout_s = rest.pop("wait_s", 30.0), rest.pop("timeout_s", 600.0)
        for name, value in (("wait_s", wait_s), ("timeout_s", timeout_s)):
            if not isinstance(value, (int, float)) or not value >= 0:
                raise BadRequest(f"`{name}` is `{value}`, not a number of seconds", hint=f"give {name}=30")
        for name in ("stream", "stream_options", "tools", "functions"):
            if name in rest:
                raise BadRequest(f"`{name}` is not an option here", hint="use stream_chat(), or the server for tools")
        if rest.get("n", 1) != 1:
            raise BadRequest("`n` is not 1: one request is one answer", hint="call chat() again")
        body = {**rest, **request, "stream": True, "stream_options": {"include_usage": True}}
        return Request(body=body, wait_s=wait_s, timeout_s=timeout_s)


def content(chunk: Chunk) -> tuple[str, str | None]:
    """Text and finish reason; the chunk with the usage has no choices."""
    for choice in chunk.get("choices", ()):
        text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        return text or "", choice.get("finish_reason")
    return "", None


def engine_error(error: Mapping[str, Any]) -> Exception:
    message = str(error.get("message"))
    if error.get("type") == "exceed_context_size_error":
        return ContextLengthExceeded(message, hint="open the model with more context_tokens, or send a shorter prompt")
    if str(error.get("code", "")).startswith("4"):
        return BadRequest(message)
    return UpstreamFailed(f"llama.cpp: {message}")
