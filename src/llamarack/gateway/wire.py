"""The bytes that clients parse: error envelopes, stream events, keep-alives. Bytes in, bytes out; no sockets.

One form only, since some client breaks on every other: `data: <json>\\n\\n` ... `data: [DONE]\\n\\n`, errors inside a
stream as `event: error`, errors before it as `{"error": {message, type, param, code}}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import orjson

from llamarack.errors import LlamarackError, RequestError
from llamarack.units import format_duration

DONE = b"data: [DONE]"
EVENT_END = b"\n\n"
COMMENT_HEARTBEAT = b": keep-alive\n\n"
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
JSON_TYPE = "application/json; charset=utf-8"
# Spring AI 1.x and LangChain4j parse it into a closed enum. In JSON text a quotation mark is escaped, so that this
# pattern matches the field alone.
_FOREIGN_REASON = re.compile(rb'"finish_reason":( ?)"(?!(?:stop|length|content_filter|tool_calls)")([^"]*)"')
_NATURAL_ENDS = frozenset({b"", b"eos", b"eos_token", b"end_turn", b"stop_sequence"})


def envelope(error: LlamarackError) -> dict[str, Any]:
    """`{"error": {...}}` with all four keys; `source` says which side spoke."""
    param = error.param if isinstance(error, RequestError) else None
    kind = error.type if isinstance(error, RequestError) else "server_error"
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code, "source": "gateway"}}


def error_body(error: LlamarackError) -> bytes:
    return orjson.dumps(envelope(error))


def error_headers(error: LlamarackError) -> dict[str, str]:
    """Retry-After (whole seconds, at most 120: clients give up above) and x-should-retry, where the error has them."""
    headers: dict[str, str] = {}
    if isinstance(error, RequestError):
        if error.retry_after_s is not None:
            capped = min(120.0, max(0.0, error.retry_after_s))
            headers["Retry-After"] = str(max(1, round(capped)))
            headers["retry-after-ms"] = str(round(capped * 1000))
        if error.should_retry is not None:
            headers["x-should-retry"] = "true" if error.should_retry else "false"
    return headers


def error_event(error: LlamarackError) -> bytes:
    """The only form that LangChain4j and the OpenAI SDKs all see; no [DONE] follows."""
    return b"event: error\ndata: " + error_body(error) + EVENT_END


def engine_error_envelope(status: int, body: bytes, fields: Iterable[str] = ()) -> dict[str, Any]:
    """An engine's error in the one form, whatever form it came in: nested, flat, a string, not JSON at all.

    `fields`: of the request; the one that the message names becomes its `param`, where the engine has not said so."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = {"message": body.decode(errors="replace").strip()[:500] or f"engine answered {status}"}
    inner = value.get("error", value) if isinstance(value, dict) else value
    if not isinstance(inner, dict):
        inner = {"message": "" if inner is None else str(inner)}
    kind = inner.get("type")
    code = inner.get("code")
    is_context = "exceed_context_size" in str(kind) or "context length" in str(inner.get("message", "")).lower()
    message = str(inner.get("message") or f"engine answered {status}")
    param = inner.get("param")
    if not isinstance(param, str):
        param = next((name for name in fields if re.search(rf"\b{re.escape(name)}\b", message)), None)
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error" if is_context or not isinstance(kind, str) else kind,
            "param": param,
            "code": "context_length_exceeded" if is_context else code if isinstance(code, str) else None,
            "source": "engine",
        }
    }


def empty_delta(chunk_id: str, created_unix_s: int, model: str, *, chat: bool) -> bytes:
    """A keep-alive that even parsers without comments accept: a chunk that adds nothing."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
    choice |= {"delta": {"content": ""}} if chat else {"text": ""}
    chunk = {
        "id": chunk_id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": created_unix_s,
        "model": model,
        "choices": [choice],
    }
    return b"data: " + orjson.dumps(chunk) + EVENT_END


def with_closed_reasons(data: bytes) -> bytes:
    """An engine's own finish reasons (`abort`, say) in the words of the enum: ended by itself, or cut short."""
    return _FOREIGN_REASON.sub(_closed_reason, data)


def _closed_reason(match: re.Match[bytes]) -> bytes:
    return b'"finish_reason":%s"%s"' % (match[1], b"stop" if match[2] in _NATURAL_ENDS else b"length")


def waited(seconds: float) -> str:
    return f"no replica was free within {format_duration(seconds)}"


def shown(value: Any) -> str:
    """A client's value for an error message, shortened."""
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
