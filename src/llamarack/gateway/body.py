"""Request bodies: checked as far as the gateway must, changed as little as possible. Pure.

A body goes to the engine byte for byte unless a default, a cap or the wish for usage must be set; a missing field is
spliced in front, so that the client's own bytes stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from llamarack.config import Defaults
from llamarack.engine.dialects import DIALECTS
from llamarack.errors import BadRequest, ModelNotFound
from llamarack.gateway.wire import shown
from llamarack.supervise.table import ModelRow, ReplicaRow

_LIMITS = {
    "chat": ("max_tokens", "max_completion_tokens"),
    "text": ("max_tokens", "max_completion_tokens"),
    "responses": ("max_output_tokens",),
}
_MOST_CHOICES = 128
_LLAMACPP_LIMIT = "n_predict"  # wins over the others there; -1: without end


@dataclass(slots=True, eq=False)
class Parsed:
    """What the gateway reads of a body. `shape`: chat | text | responses. `wants_usage`: the client asked for the usage
    chunk of a stream. `deployment`: the model that the path named, which wins over the body's."""

    value: dict[str, Any]
    model: str
    shape: str
    stream: bool
    wants_usage: bool
    deployment: str | None = None

    @property
    def output_limit(self) -> int | None:
        """The client's own."""
        for name in _LIMITS[self.shape]:
            value = self.value.get(name)
            if isinstance(value, int) and value > 0:
                return value
        return None

    @property
    def choices(self) -> int:
        """Sequences that it makes: choices of each of its prompts."""
        value, prompt = self.value.get("n"), self.value.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
        return prompts * (value if isinstance(value, int) else 1)


def parse(raw: bytes, served: dict[str, ModelRow], *, shape: str, deployment: str | None = None) -> Parsed:
    """Raises BadRequest naming the field, or ModelNotFound listing the served ids."""
    value = parse_object(raw)
    model = resolve_model(value, served, deployment)
    stream = value.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest(f"`stream` must be true or false, {shown(stream)} given", param="stream")
    options = value.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest(f"`stream_options` must be an object, {shown(options)} given", param="stream_options")
    for name in _LIMITS[shape]:
        limit = value.get(name)
        lowest = 0 if shape == "text" else 1  # completions: 0 with echo scores a prompt
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < lowest):
            raise BadRequest(f"`{name}` must be a whole number of at least {lowest}, {shown(limit)} given", param=name)
    _require_fields(value, shape)
    return Parsed(value, model, shape, bool(stream), bool(options and options.get("include_usage")), deployment)


def _require_fields(value: dict[str, Any], shape: str) -> None:
    if shape == "chat":
        messages = value.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest(f"`messages` must be a list of messages, {shown(messages)} given", param="messages")
    elif shape == "text" and "prompt" not in value:
        raise BadRequest("`prompt` is missing", param="prompt")
    elif shape == "responses":
        if value.get("input") in (None, "", []):
            raise BadRequest("`input` is missing", param="input")
        if value.get("previous_response_id") is not None:
            raise BadRequest(
                "`previous_response_id`: answers are not kept here",
                hint="send the whole conversation in `input`, with store: false",
                param="previous_response_id",
            )
    choices = value.get("n")
    if choices is not None and (
        isinstance(choices, bool) or not isinstance(choices, int) or not 1 <= choices <= _MOST_CHOICES
    ):
        raise BadRequest(f"`n` must be 1 to {_MOST_CHOICES}, {shown(choices)} given", param="n")
    stop = value.get("stop")
    if stop is not None and not (
        isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(each, str) for each in stop))
    ):
        raise BadRequest(f"`stop` must be a text or a list of texts, {shown(stop)} given", param="stop")
    form = value.get("response_format")
    kinds = ("text", "json_object", "json_schema")
    if form is not None and not (isinstance(form, dict) and form.get("type") in kinds):
        raise BadRequest(
            f"`response_format` must have a `type` of {', '.join(kinds)}, {shown(form)} given", param="response_format"
        )


def require_supported(value: dict[str, Any], path: str, rows: Sequence[ReplicaRow]) -> None:
    """Raises BadRequest for a field that every engine of the model would drop without a word."""
    if not rows:
        return
    engines = {row.engine for row in rows}
    tables = [DIALECTS[engine].deviations.ignored_fields.get(path, {}) for engine in engines]
    for name, harmless in tables[0].items():
        if name in value and all(name in table for table in tables) and value[name] not in harmless:
            raise BadRequest(
                f"`{name}`: {' and '.join(sorted(engines))} cannot do this, {shown(value[name])} given",
                hint=f"leave `{name}` out",
                param=name,
            )


def dropped_fields(path: str, rows: Sequence[ReplicaRow]) -> frozenset[str]:
    """Those that `require_supported` looks at."""
    return frozenset(name for row in rows for name in DIALECTS[row.engine].deviations.ignored_fields.get(path, {}))


def parse_object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise BadRequest("the request has no body", hint="send a JSON object with Content-Type: application/json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, {shown(value)} given")
    return value


def resolve_model(value: dict[str, Any], served: dict[str, ModelRow], deployment: str | None = None) -> str:
    """The model asked for; a body without one gets the only model there is."""
    model = value.get("model") if deployment is None else deployment
    if model is None and len(served) == 1:
        return next(iter(served))
    if not isinstance(model, str):
        raise BadRequest(f"`model` must be a string, {shown(model)} given; {_ids(served)}", param="model")
    if model not in served:
        raise ModelNotFound(f"the model `{model}` is not served here; {_ids(served)}", param="model")
    return model


def for_engine(raw: bytes, parsed: Parsed, model: ModelRow, *, room_tokens: int | None = None) -> bytes:
    """The body as the engine gets it. `room_tokens`: what its prompt leaves of the context, where that is known: the
    file's own default for the output never makes a request too long that the client did not make so."""
    names = _LIMITS[parsed.shape]
    cap, changed = model.max_output_tokens, dict[str, Any]()
    if cap is not None:
        changed = _capped(parsed.value, names, cap)
    added = _defaults(parsed.value, names, model.defaults, cap, room_tokens)
    if parsed.deployment is not None and parsed.value.get("model") != parsed.deployment:
        (changed if "model" in parsed.value else added)["model"] = parsed.deployment
    if parsed.stream and not parsed.wants_usage and parsed.shape != "responses":
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


def _capped(value: dict[str, Any], names: tuple[str, ...], cap: int) -> dict[str, Any]:
    """Limits over the cap, and a cap where every limit was given as null or as endless."""
    given = {name: value[name] for name in (*names, _LLAMACPP_LIMIT) if name in value}
    over = {name: cap for name, limit in given.items() if isinstance(limit, int | float) and not 0 <= limit <= cap}
    if given and not over and all(limit is None for limit in given.values()):
        return {names[0]: cap}
    return over


def _defaults(
    value: dict[str, Any], names: tuple[str, ...], defaults: Defaults, cap: int | None, room_tokens: int | None
) -> dict[str, Any]:
    """Fields that the client left out. A key given as null is the client's own word and stays."""
    added: dict[str, Any] = {}
    if names[0] not in value and not any(name in value for name in names):
        limits = [limit for limit in (defaults.max_tokens, cap) if limit is not None]
        if limits:
            added[names[0]] = min([*limits, *([room_tokens] if room_tokens is not None else [])])
    if defaults.temperature is not None and "temperature" not in value:
        added["temperature"] = defaults.temperature
    if defaults.top_p is not None and "top_p" not in value:
        added["top_p"] = defaults.top_p
    return added


def _ids(served: dict[str, ModelRow]) -> str:
    return "served: " + ", ".join(f"`{name}`" for name in served)
