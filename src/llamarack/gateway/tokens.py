"""`/tokenize` and `/detokenize`: vLLM's shape and llama.cpp's shape, whichever engine answers."""

from __future__ import annotations

from typing import Any

import orjson

from llamarack.engine.dialects import DIALECTS
from llamarack.errors import BadRequest, UpstreamFailed
from llamarack.gateway.upstream import EngineBroke, post
from llamarack.supervise.table import ReplicaRow


async def tokenize(replica: ReplicaRow, value: dict[str, Any]) -> dict[str, Any]:
    """`{count, max_model_len, tokens}` for `prompt`, `messages` or `content`. Raises BadRequest, UpstreamFailed."""
    if DIALECTS[replica.engine].deviations.tokenizes_as_vllm:
        return await _tokenize_by_vllm(replica, value)
    if "messages" in value:
        rendered = await _post(replica, "/apply-template", {"messages": value["messages"]})
        text, add_special = rendered["prompt"], False  # the template has written them
    else:
        text = value.get("prompt", value.get("content"))
        add_special = value.get("add_special_tokens", value.get("add_special", True))
    if not isinstance(text, str):
        raise BadRequest("`prompt` must be a string (or give `messages`)", param="prompt")
    body = {"content": text, "add_special": bool(add_special), "parse_special": True}
    tokens = (await _post(replica, "/tokenize", body))["tokens"]
    return {"count": len(tokens), "max_model_len": replica.context_tokens, "tokens": tokens}


async def detokenize(replica: ReplicaRow, value: dict[str, Any]) -> dict[str, Any]:
    """`{prompt, content}` (the same text under both engines' names) for `tokens`."""
    tokens = value.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise BadRequest("`tokens` must be a list of token ids", param="tokens")
    answer = await _post(replica, "/detokenize", {"tokens": tokens})
    text = answer["prompt"] if DIALECTS[replica.engine].deviations.tokenizes_as_vllm else answer["content"]
    return {"prompt": text, "content": text}


async def _tokenize_by_vllm(replica: ReplicaRow, value: dict[str, Any]) -> dict[str, Any]:
    if "messages" in value:
        body = {"messages": value["messages"], "add_special_tokens": False}
    else:
        text = value.get("prompt", value.get("content"))
        if not isinstance(text, str):
            raise BadRequest("`prompt` must be a string (or give `messages`)", param="prompt")
        add_special = value.get("add_special_tokens", value.get("add_special", True))
        body = {"prompt": text, "add_special_tokens": bool(add_special)}
    answer = await _post(replica, "/tokenize", body)
    return {"count": len(answer["tokens"]), "max_model_len": replica.context_tokens, "tokens": answer["tokens"]}


async def _post(replica: ReplicaRow, path: str, body: dict[str, Any]) -> dict[str, Any]:
    assert replica.endpoint is not None
    try:
        response = await post(replica.endpoint, path, orjson.dumps(body), {})
        try:
            raw = await response.read()
        finally:
            response.close()
    except EngineBroke as error:
        raise UpstreamFailed(f"the engine broke off: {error}", retry_after_s=2) from error
    if response.status == 503:
        raise UpstreamFailed("the engine is loading", retry_after_s=2)
    if response.status != 200:
        raise BadRequest(f"the engine refused: {raw.decode(errors='replace')[:300]}")
    value: dict[str, Any] = orjson.loads(raw)
    return value
