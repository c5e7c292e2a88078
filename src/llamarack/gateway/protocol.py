"""HTTP/1.1 as the gateway speaks it over aiohttp: limits on what is read, and the error form where there is no request.

What `server` decides is not here; another transport would replace this file.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from llamarack.errors import BadRequest, LlamarackError, RequestTooLarge, RequestTooSlow
from llamarack.gateway import wire
from llamarack.gateway.relay import json_response

MAX_BODY_BYTES = 32 * 1024**2
_MAX_HEADER_BYTES = 32 * 1024

log = logging.getLogger(__name__)


def waits_to_continue(request: web.BaseRequest) -> bool:
    return request.headers.get("Expect", "").lower() == "100-continue"


def is_last(request: web.BaseRequest) -> bool:
    """Whether the HTTP parser takes what follows on this connection for another protocol."""
    return request.method == "CONNECT" or request.headers.get("Upgrade", "").lower() == "websocket"


async def read_body(request: web.BaseRequest, timeout_s: float) -> bytes:
    """The whole body. Raises RequestTooLarge, RequestTooSlow, BadRequest for one that is no JSON or breaks off."""
    kind = request.content_type
    if kind in {"application/x-www-form-urlencoded", "multipart/form-data"}:
        raise BadRequest(f"the body is `{kind}`", hint="send Content-Type: application/json")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise RequestTooSlow(f"the body did not come within {timeout_s:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {error}") from error


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")


def error_response(error: LlamarackError, request_id: str) -> web.Response:
    return json_response(error.http_status, wire.error_body(error), request_id, wire.error_headers(error))


def _make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)


class _EnvelopeHandler(RequestHandler):
    """Answers what never became a request (a malformed head, say) in the one error form; waits for a first head only
    so long."""

    __slots__ = ("_head_timeout_s", "_head_timer")

    def __init__(self, manager: web.Server, *, head_timeout_s: float, **kw: Any) -> None:
        super().__init__(manager, **kw)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._head_timer = asyncio.get_running_loop().call_later(self._head_timeout_s, self._require_request)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def _require_request(self) -> None:
        if not self._request_count and self.transport is not None:
            self.transport.close()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """The rest of a body that broke off is read after the answer; that it breaks off again is no news."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        error: LlamarackError = LlamarackError("the gateway met a fault of its own")
        if status < 500:
            first_line = (message or "not HTTP/1.1").strip().splitlines()[0]
            error = BadRequest(f"the request is malformed: {first_line}")
            error.http_status = status
        else:
            log.error("unexpected path=%s", request.rel_url.raw_path, exc_info=exc)
        response = error_response(error, uuid.uuid4().hex)
        response.force_close()
        return response


class EnvelopeServer(web.Server):
    """Makes the handler of each connection; `head_timeout_s`: for its first head."""

    def __init__(self, handle: Any, *, keep_alive_s: float, head_timeout_s: float) -> None:
        super().__init__(
            handle,
            request_factory=_make_request,
            handler_cancellation=True,  # a disconnect ends the handler at once, also in silence
            keepalive_timeout=keep_alive_s,
            access_log=None,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )
        self._head_timeout_s = head_timeout_s

    def __call__(self) -> RequestHandler:
        return _EnvelopeHandler(self, head_timeout_s=self._head_timeout_s, loop=self._loop, **self._kwargs)
