"""The same exchange over aiohttp: slower and older, kept as the reference that the fast server is compared with."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from llamarack.errors import BadRequest, LlamarackError, RequestTooLarge, RequestTooSlow
from llamarack.gateway import wire
from llamarack.gateway.exchange import MAX_BODY_BYTES, MAX_HEAD_BYTES, Handler
from llamarack.gateway.ids import new_id

_HIGH_WATER_BYTES = 64 * 1024

log = logging.getLogger(__name__)


class AiohttpExchange:
    """`exchange.Exchange`: a task writes what the handler, which never waits, has put down."""

    def __init__(self, request: web.BaseRequest) -> None:
        self.method = request.method
        self.target = request.rel_url.raw_path
        self.path = request.path
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in request.headers.items()}
        self.status: int | None = None
        self.closing = request.method == "CONNECT"
        self.on_flow: Callable[[bool], None] | None = None
        self.response: web.StreamResponse | None = None
        self.writing: asyncio.Task[None] | None = None
        self._request = request
        self._pending: list[bytes | None] = []
        self._pending_bytes = 0
        self._news = asyncio.Event()
        self._flows = asyncio.Event()
        self._flows.set()

    @property
    def is_clogged(self) -> bool:
        return not self._flows.is_set()

    async def body(self, timeout_s: float) -> bytes:
        if (self._request.content_length or 0) > MAX_BODY_BYTES:
            raise _too_large()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._request.read()
        except TimeoutError:
            raise RequestTooSlow(f"the body did not come within {timeout_s:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise _too_large() from None
        except web.RequestPayloadError as error:
            raise BadRequest(f"the body cannot be read: {error}") from error

    def go_on(self) -> None:
        if self._request.transport is not None:
            self._request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.response = web.Response(status=status, body=body, headers=dict(headers))

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        response = self.response = web.StreamResponse(status=status, headers=dict(headers))
        if self.closing:
            response.force_close()
        self.writing = asyncio.create_task(self._write_all(response))

    def write(self, data: bytes) -> None:
        self._put(data)

    def end(self) -> None:
        self._put(None)

    def hold(self) -> None:
        pass  # its writer gathers what there is

    def let_go(self) -> None:
        pass

    def abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    async def drained(self) -> None:
        await self._flows.wait()

    async def finished(self) -> web.StreamResponse:
        """Once the handler returned."""
        if self.response is None:
            raise RuntimeError("no answer was given")
        if self.writing is not None:
            await self.writing
        if self.closing:
            self.response.force_close()
        return self.response

    def _put(self, data: bytes | None) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data or b"")
        self._news.set()
        if self._pending_bytes > _HIGH_WATER_BYTES and self._flows.is_set():
            self._flows.clear()
            if self.on_flow is not None:
                self.on_flow(True)

    async def _write_all(self, response: web.StreamResponse) -> None:
        with contextlib.suppress(ConnectionError):  # the client left: the handler is cancelled too
            await response.prepare(self._request)
            while True:
                await self._news.wait()
                self._news.clear()
                pending, self._pending = self._pending, []
                for data in pending:
                    if data is None:
                        await response.write_eof()
                        return
                    await response.write(data)
                    self._pending_bytes -= len(data)
                if not self._flows.is_set():
                    self._flows.set()
                    if self.on_flow is not None:
                        self.on_flow(False)


class AiohttpServer:
    """Makes the handler of each connection; `head_timeout_s`: for its first head."""

    def __init__(self, handle: Handler, *, keep_alive_s: float, head_timeout_s: float) -> None:
        self._handle = handle
        self._server = _EnvelopeServer(self._serve, keep_alive_s=keep_alive_s, head_timeout_s=head_timeout_s)

    def __call__(self) -> asyncio.Protocol:
        return self._server()

    async def shutdown(self, timeout_s: float) -> None:
        await self._server.shutdown(timeout_s)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        exchange = AiohttpExchange(request)
        try:
            await self._handle(exchange)
            return await exchange.finished()
        except BaseException:
            if exchange.writing is not None:
                exchange.writing.cancel()
            raise


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")


def _error_response(error: LlamarackError) -> web.Response:
    headers = {"Content-Type": wire.JSON_TYPE, "x-request-id": new_id(), **wire.error_headers(error)}
    return web.Response(status=error.http_status, body=wire.error_body(error), headers=headers)


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
        response = _error_response(error)
        response.force_close()
        return response


class _EnvelopeServer(web.Server):
    def __init__(self, handle: Any, *, keep_alive_s: float, head_timeout_s: float) -> None:
        super().__init__(
            handle,
            request_factory=_make_request,
            handler_cancellation=True,  # a disconnect ends the handler at once, also in silence
            keepalive_timeout=keep_alive_s,
            access_log=None,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
        )
        self._head_timeout_s = head_timeout_s

    def __call__(self) -> RequestHandler:
        return _EnvelopeHandler(self, head_timeout_s=self._head_timeout_s, loop=self._loop, **self._kwargs)
