"""A request once it is known who asks for what, and the two forms of answers that need no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from llamarack.errors import LlamarackError
from llamarack.gateway import wire
from llamarack.gateway.calls import Call
from llamarack.gateway.exchange import Exchange, waits_to_continue

if TYPE_CHECKING:
    from llamarack.gateway.keys import Key


@dataclass(slots=True, eq=False)
class Asked:
    """`path`: in its one form. `deployment`: the model that an Azure path names. `call`: what went to an engine."""

    exchange: Exchange
    request_id: str
    arrived_monotonic_s: float
    path: str = ""
    key: Key | None = None
    deployment: str | None = None
    call: Call | None = None


def send_json(asked: Asked, status: int, value: dict[str, Any], headers: Mapping[str, str] | None = None) -> None:
    head = {"Content-Type": wire.JSON_TYPE, "x-request-id": asked.request_id, **(headers or {})}
    asked.exchange.answer(status, head, orjson.dumps(value))


def refuse(
    exchange: Exchange, error: LlamarackError, request_id: str, headers: Mapping[str, str] | None = None
) -> None:
    if exchange.status is not None:
        exchange.abort()  # a begun answer must not look whole
        return
    if waits_to_continue(exchange):
        exchange.closing = True  # where its body never comes, what comes next would be taken for it
    head = {"Content-Type": wire.JSON_TYPE, "x-request-id": request_id, **wire.error_headers(error), **(headers or {})}
    exchange.answer(error.http_status, head, wire.error_body(error))
