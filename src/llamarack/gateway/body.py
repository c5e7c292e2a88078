"""Request bodies: checked as far as the gateway must, changed as little as possible. Pure.

A body goes to the engine byte for byte unless a default, a cap or the wish for usage must be set; a missing field is
spliced in front, so that the client's own bytes stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from llamarack.config import Defaults
from llamarack.errors import BadRequest, ModelNotFound
from llamarack.supervise.table import ModelRow

_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens")
_LLAMACPP_LIMIT = "n_predict"  # wins over the others there; -1: without end


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What the gateway reads of a body. `wants_usage`: the client asked for the usage chunk of a stream."""

    value: dict[str, Any]
    model: str
    stream: bool
    wants_usage: bool


def parse(raw: bytes, served: dict[str, ModelRow], *, chat: bool) -> Parsed:
    """Raises BadRequest naming the field, or ModelNotFound listing the served ids."""
    value = parse_object(raw)
    model = resolve_model(value, served)
    stream = value.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest(f"`stream` must be true or false, {_shown(stream)} given", param="stream")
    options = value.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest(f"`stream_options` must be an object, {_shown(options)} given", param="stream_options")
    for name in _OUTPUT_LIMITS:
        limit = value.get(name)
        lowest = 1 if chat else 0  # completions: 0 with echo scores a prompt
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < lowest):
            raise BadRequest(f"`{name}` must be a whole number of at least {lowest}, {_shown(limit)} given", param=name)
    if chat:
        messages = value.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest(f"`messages` must be a list of messages, {_shown(messages)} given", param="messages")
    elif "prompt" not in value:
        raise BadRequest("`prompt` is missing", param="prompt")
    return Parsed(
        value=value, model=model, stream=bool(stream), wants_usage=bool(options and options.get("include_usage"))
    )


def parse_object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise BadRequest("the request has no body", hint="send a JSON object with Content-Type: application/json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, {_shown(value)} given")
    return value


def resolve_model(value: dict[str, Any], served: dict[str, ModelRow]) -> str:
    """The model asked for; a body without one gets the only model there is."""
    model = value.get("model")
    if model is None and len(served) == 1:
        return next(iter(served))
    if not isinstance(model, str):
        raise BadRequest(f"`model` must be a string, {_shown(model)} given; {_ids(served)}", param="model")
    if model not in served:
        raise ModelNotFound(f"the model `{model}` is not served here; {_ids(served)}", param="model")
    return model


def for_engine(raw: bytes, parsed: Parsed, model: ModelRow) -> bytes:
    """The body as the engine gets it."""
    changed = _capped(parsed.value, model.max_output_tokens)
    added = _defaults(parsed.value, model.defaults, model.max_output_tokens)
    if parsed.stream and not parsed.wants_usage:
        options = parsed.value.get("stream_options")
        wanted = {**(options or {}), "include_usage": True}
        if "stream_options" in parsed.value:
            changed["stream_options"] = wanted
        else:
            added["stream_options"] = wanted
    if changed:
        return orjson.dumps({**parsed.value, **changed, **added})
    if not added:
        return raw
    start = raw.index(b"{") + 1
    return raw[:start] + orjson.dumps(added)[1:-1] + b"," + raw[start:]


def _capped(value: dict[str, Any], cap: int | None) -> dict[str, Any]:
    """Limits over the cap, and a cap where every limit was given as null or as endless."""
    if cap is None:
        return {}
    given = {name: value[name] for name in (*_OUTPUT_LIMITS, _LLAMACPP_LIMIT) if name in value}
    over = {name: cap for name, limit in given.items() if isinstance(limit, int | float) and not 0 <= limit <= cap}
    if given and not over and all(limit is None for limit in given.values()):
        return {"max_tokens": cap}
    return over


def _defaults(value: dict[str, Any], defaults: Defaults, cap: int | None) -> dict[str, Any]:
    """Fields that the client left out. A key given as null is the client's own word and stays."""
    added: dict[str, Any] = {}
    if not any(name in value for name in _OUTPUT_LIMITS):
        limits = [limit for limit in (defaults.max_tokens, cap) if limit is not None]
        if limits:
            added["max_tokens"] = min(limits)
    if defaults.temperature is not None and "temperature" not in value:
        added["temperature"] = defaults.temperature
    if defaults.top_p is not None and "top_p" not in value:
        added["top_p"] = defaults.top_p
    return added


def _ids(served: dict[str, ModelRow]) -> str:
    return "served: " + ", ".join(f"`{name}`" for name in served)


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
