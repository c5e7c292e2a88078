"""`/tokenize` and `/detokenize`: vLLM's shape and llama.cpp's shape, whichever engine answers."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from llamarack.errors import BadRequest, UpstreamFailed
from llamarack.gateway.upstream import EngineBroke, EnginePool
from llamarack.supervise.table import ReplicaRow


async def tokenize(pool: EnginePool, replica: ReplicaRow, value: dict[str, Any]) -> dict[str, Any]:
    """`{count, max_model_len, tokens}` for `prompt`, `messages` or `content`. Raises BadRequest, UpstreamFailed."""
    if "messages" in value:
        rendered = await _post(pool, replica, "/apply-template", {"messages": value["messages"]})
        text, add_special = rendered["prompt"], False  # the template has written them
    else:
        text = value.get("prompt", value.get("content"))
        add_special = value.get("add_special_tokens", value.get("add_special", True))
    if not isinstance(text, str):
        raise BadRequest("`prompt` must be a string (or give `messages`)", param="prompt")
    body = {"content": text, "add_special": bool(add_special), "parse_special": True}
    tokens = (await _post(pool, replica, "/tokenize", body))["tokens"]
    return {"count": len(tokens), "max_model_len": replica.context_tokens, "tokens": tokens}


async def detokenize(pool: EnginePool, replica: ReplicaRow, value: dict[str, Any]) -> dict[str, Any]:
    """`{prompt, content}` (the same text under both engines' names) for `tokens`."""
    tokens = value.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise BadRequest("`tokens` must be a list of token ids", param="tokens")
    text = (await _post(pool, replica, "/detokenize", {"tokens": tokens}))["content"]
    return {"prompt": text, "content": text}


async def _post(pool: EnginePool, replica: ReplicaRow, path: str, body: dict[str, Any]) -> dict[str, Any]:
    assert replica.endpoint is not None
    try:
        response = await pool.post(replica.endpoint, path, orjson.dumps(body), {})
        try:
            raw = await response.read()
        finally:
            response.close()
    except (EngineBroke, aiohttp.ClientError) as error:
        raise UpstreamFailed(f"the engine broke off: {error}", retry_after_s=2) from error
    if response.status != 200:
        raise BadRequest(f"the engine refused: {raw.decode(errors='replace')[:300]}")
    value: dict[str, Any] = orjson.loads(raw)
    return value
