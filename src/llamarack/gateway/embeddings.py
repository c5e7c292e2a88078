"""/v1/embeddings: what the client may ask, and its answer as floats or base64 whichever of the two the engine gives."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from typing import Any

import orjson

from llamarack.errors import BadRequest
from llamarack.gateway import wire
from llamarack.gateway.exchange import Exchange

_FORMATS = ("float", "base64")
# How engines say that this model, or they themselves, have none.
_HAS_NONE = frozenset({404, 405, 501})
_NOT_FOR_EMBEDDINGS = (b"not support Embeddings", b"Pooling type", b"not support embeddings")


def checked_embeddings(value: dict[str, Any]) -> dict[str, Any]:
    """Raises BadRequest naming the field."""
    given = value.get("input")
    is_text = isinstance(given, str) and given
    is_list = isinstance(given, list) and given
    if not is_text and not is_list:
        raise BadRequest("`input` must be a text, a list of texts, or token ids, and not empty", param="input")
    wanted = value.get("encoding_format")
    if wanted is not None and wanted not in _FORMATS:
        shown = wire.shown(wanted)
        raise BadRequest(f'`encoding_format` must be "float" or "base64", {shown} given', param="encoding_format")
    return value


def embeddings_answer(exchange: Exchange, asked: dict[str, Any], model: str) -> Exchange:
    """`exchange`, whose answer is turned into what `asked` wants."""
    return _EmbeddingsExchange(exchange, asked.get("encoding_format") or "float", model)


class _EmbeddingsExchange:
    """An `Exchange` but for `answer`."""

    def __init__(self, exchange: Exchange, wanted: str, model: str) -> None:
        self._exchange = exchange
        self._wanted = wanted
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in {"_exchange", "_wanted", "_model"}:
            object.__setattr__(self, name, value)
        else:
            setattr(self._exchange, name, value)

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        if status in _HAS_NONE or (status in {400, 500} and any(words in body for words in _NOT_FOR_EMBEDDINGS)):
            error = BadRequest(
                f"the model `{self._model}` is served for generation, not for embeddings",
                hint="engine_args: {embedding: true, pooling_type: mean} (llamacpp), {runner: pooling} (vllm)",
                param="model",
            )
            status, body = error.http_status, wire.error_body(error)
        elif status == 200:
            body = _in_format(body, self._wanted)
        self._exchange.answer(status, headers, body)


def _in_format(body: bytes, wanted: str) -> bytes:
    """Untouched where it has the wanted form already. base64: little-endian 32-bit floats."""
    try:
        value = orjson.loads(body)
        rows = value["data"]
        if all(isinstance(row["embedding"], str) == (wanted == "base64") for row in rows):
            return body
        for row in rows:
            given = row["embedding"]
            if wanted == "base64":
                row["embedding"] = base64.b64encode(struct.pack(f"<{len(given)}f", *given)).decode()
            else:
                raw = base64.b64decode(given)
                row["embedding"] = list(struct.unpack(f"<{len(raw) // 4}f", raw))
        return orjson.dumps(value)
    except (ValueError, KeyError, TypeError, struct.error):
        return body  # not the form of an embeddings answer; the client sees what the engine said
