"""The HTTP server of one gateway worker: paths, request ids, envelopes on every way out."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from llamarack.config import Gateway
from llamarack.errors import (
    BadRequest,
    DeadlineExceeded,
    LlamarackError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    NotReady,
    RequestError,
    RequestTooSlow,
)
from llamarack.gateway import body as bodies
from llamarack.gateway.admission import Admission
from llamarack.gateway.dashboard import STATUS_PATH, Dashboard
from llamarack.gateway.keys import Keys
from llamarack.gateway.metrics import Metrics, merged, with_labels
from llamarack.gateway.protocol import EnvelopeServer, error_response, is_last, read_body, waits_to_continue
from llamarack.gateway.rack_metrics import rack_text
from llamarack.gateway.relay import Call, ClientLeft, Relay, json_response
from llamarack.gateway.routing import ready_replicas
from llamarack.gateway.tokens import detokenize, tokenize
from llamarack.gateway.upstream import get_text
from llamarack.supervise.state import State
from llamarack.supervise.table import ModelRow, ReplicaRow
from llamarack.version import __version__

# For a first head and for a whole body: 32 MiB at 4.5 Mbit/s. Without, a byte now and then holds a connection for ever.
_SENDING_TIMEOUT_S = 60.0
_ENGINE_METRICS_TIMEOUT_S = 2.0
_PREFIX = re.compile(r"^(?:/v1)+(?=/|$)")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HEALTH_PATHS = {"/live", "/livez", "/ready", "/readyz", "/health"}
_GENERATING = {
    "/chat/completions": ("/v1/chat/completions", True),
    "/completions": ("/v1/completions", False),
}

log = logging.getLogger(__name__)
access_log = logging.getLogger("llamarack.access")
Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]
SmallRequest = Callable[[ReplicaRow, dict[str, Any]], Awaitable[dict[str, Any]]]


class GatewayServer:
    """Built once per worker; `handle` is what aiohttp calls for every request."""

    def __init__(
        self,
        settings: Gateway,
        admission: Admission,
        metrics: Metrics,
        keys: Keys | None,
        dashboard: Dashboard | None = None,
    ) -> None:
        self._admission = admission
        self._metrics = metrics
        self._keys = keys
        self._dashboard = dashboard or Dashboard(None)
        self._relay = Relay(settings, admission, metrics)
        self._keep_alive_s = settings.keep_alive_s
        self._request_timeout_s = settings.request_timeout_s
        self._sending_timeout_s = min(_SENDING_TIMEOUT_S, settings.request_timeout_s)
        self._routes: dict[str, dict[str, Handler]] = {
            "/live": {"GET": self._live},
            "/livez": {"GET": self._live},
            "/ready": {"GET": self._ready},
            "/readyz": {"GET": self._ready},
            "/health": {"GET": self._ready},
            "/metrics": {"GET": self._metrics_text},
            "/version": {"GET": self._version},
            STATUS_PATH: {"GET": self._dashboard_status},
            "/models": {"GET": self._models},
            "/chat/completions": {"POST": self._generate},
            "/completions": {"POST": self._generate},
            "/embeddings": {"POST": self._embeddings},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
        }

    def protocol_factory(self) -> web.Server:
        return EnvelopeServer(self.handle, keep_alive_s=self._keep_alive_s, head_timeout_s=self._sending_timeout_s)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        started = time.monotonic()
        given = request.headers.get("X-Request-Id", "")
        shown_path = request.rel_url.raw_path  # still percent-encoded: a line break in it makes no line in the log
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        try:
            response = await self._answer(request, request_id)
        except RequestError as error:
            response = error_response(error, request_id)
        except (asyncio.CancelledError, ClientLeft):
            access_log.info("%s %s 499 id=%s left after %.3f s", request.method, shown_path, request_id,
                            time.monotonic() - started)  # fmt: skip
            raise
        except Exception:
            log.exception("unexpected request=%s path=%s", request_id, shown_path)
            response = error_response(LlamarackError("the gateway met a fault of its own"), request_id)
        if response.status == RequestTooSlow.http_status or is_last(request):
            response.force_close()
        if waits_to_continue(request) and "continued" not in request:
            response.force_close()  # its body never comes: what comes next on this connection would be taken for it
        # A page that looks every second would fill the log with itself.
        level = logging.DEBUG if request.path == STATUS_PATH and response.status == 200 else logging.INFO
        access_log.log(level, "%s %s %d id=%s %.3f s", request.method, shown_path, response.status, request_id,
                       time.monotonic() - started)  # fmt: skip
        return response

    async def _answer(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        page = self._dashboard.page(request, request_id)
        if page is not None:
            return page
        path = _PREFIX.sub("", request.path)
        path = path.rstrip("/") or "/"
        if self._keys is not None and path not in _HEALTH_PATHS:
            self._keys.require(request.headers)
        methods = self._routes.get(path)
        if methods is None and path.startswith("/models/"):
            methods = {"GET": self._one_model}
        if methods is None:
            raise NotFound(f"the path `{request.path}` is not known here", hint="POST /v1/chat/completions")
        method = "GET" if request.method == "HEAD" else request.method
        handler = methods.get(method)
        if handler is None:
            allowed = ", ".join(methods)
            refusal = MethodNotAllowed(f"`{request.path}` takes {allowed}, {request.method} given")
            response = error_response(refusal, request_id)
            response.headers["Allow"] = allowed
            return response
        if waits_to_continue(request):
            request["continued"] = True
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        return await handler(request, request_id)

    # -- generation ---------------------------------------------------------------------------------------------

    async def _generate(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        arrived = time.monotonic()
        engine_path, chat = _GENERATING[_PREFIX.sub("", request.path).rstrip("/")]
        raw = await self._read_body(request)
        served = self._served()
        parsed = bodies.parse(raw, served, chat=chat)
        call = Call(
            request=request,
            request_id=request_id,
            model=parsed.model,
            engine_path=engine_path,
            body=bodies.for_engine(raw, parsed, served[parsed.model]),
            chat=chat,
            stream=parsed.stream,
            hide_usage=parsed.stream and not parsed.wants_usage,
            arrived_monotonic_s=arrived,
        )
        code = "499"
        try:
            response = await self._relay.serve(call)
            code = str(response.status)
            return response
        except RequestError as error:
            code = str(error.http_status)
            raise
        except (asyncio.CancelledError, ClientLeft):
            self._metrics.cancelled.labels(call.model).inc()
            raise
        finally:
            self._account(call, code)

    def _account(self, call: Call, code: str) -> None:
        metrics = self._metrics
        metrics.requests.labels(call.model, code).inc()
        metrics.duration.labels(call.model).observe(time.monotonic() - call.arrived_monotonic_s)
        if call.first_event_s is not None:
            metrics.first_token.labels(call.model).observe(call.first_event_s)
        for counter, name in (
            (metrics.prompt_tokens, "prompt_tokens"),
            (metrics.generated_tokens, "completion_tokens"),
        ):
            count = call.usage.get(name)
            if isinstance(count, int):
                counter.labels(call.model).inc(count)
        self._count_traffic(call, code)

    def _count_traffic(self, call: Call, code: str) -> None:
        """For the dashboard: what the events of a stream let one think is put right by the engine's own count."""
        traffic = self._metrics.traffic
        tokens = call.usage.get("completion_tokens")
        per_token_s = None
        if isinstance(tokens, int):
            traffic.count_tokens(call.model, tokens - call.streamed_events)
            if call.first_event_s is not None and tokens > 1:
                taken_s = time.monotonic() - call.arrived_monotonic_s
                per_token_s = (taken_s - call.first_event_s) / (tokens - 1)
                self._metrics.per_token.labels(call.model).observe(per_token_s)
        first_token_s = call.first_event_s
        traffic.count_request(
            call.model, failed=code.startswith("5"), first_token_s=first_token_s, per_token_s=per_token_s
        )

    async def _embeddings(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        value = bodies.parse_object(await self._read_body(request))
        model = bodies.resolve_model(value, self._served())
        raise BadRequest(f"the model `{model}` is served for generation, not for embeddings", param="model")

    async def _tokenize(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        value = bodies.parse_object(await self._read_body(request))
        return json_response(200, orjson.dumps(await self._small(tokenize, value)), request_id)

    async def _detokenize(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        value = bodies.parse_object(await self._read_body(request))
        return json_response(200, orjson.dumps(await self._small(detokenize, value)), request_id)

    async def _small(self, ask: SmallRequest, value: dict[str, Any]) -> dict[str, Any]:
        """An answer without generated tokens, from any ready replica: it takes no slot."""
        model = bodies.resolve_model(value, self._served())
        ready = ready_replicas(self._admission.table.replicas, model)
        if not ready:
            raise NotReady(f"the model `{model}` is not ready yet", retry_after_s=5)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await ask(ready[0], value)
        except TimeoutError:
            raise DeadlineExceeded(f"not finished within {self._request_timeout_s:g} s") from None

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        return await read_body(request, self._sending_timeout_s)

    # -- what is served -----------------------------------------------------------------------------------------

    def _served(self) -> dict[str, ModelRow]:
        return {model.name: model for model in self._admission.table.models}

    async def _models(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        rows = [self._model_object(model) for model in self._admission.table.models]
        return json_response(200, orjson.dumps({"object": "list", "data": rows}), request_id)

    async def _one_model(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        name = _PREFIX.sub("", request.path).removeprefix("/models/")
        served = self._served()
        if name not in served:
            raise ModelNotFound(f"the model `{name}` is not served here; served: {', '.join(served)}", param="model")
        return json_response(200, orjson.dumps(self._model_object(served[name])), request_id)

    def _model_object(self, model: ModelRow) -> dict[str, Any]:
        rows = [row for row in self._admission.table.replicas if row.model == model.name]
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_unix_s,
            "owned_by": "llamarack",
            "max_model_len": min((row.context_tokens for row in rows), default=None),
        }

    async def _version(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return json_response(200, orjson.dumps({"version": __version__}), request_id)

    async def _dashboard_status(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return json_response(200, await self._dashboard.status(), request_id, headers)

    # -- health -------------------------------------------------------------------------------------------------

    async def _live(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return json_response(200, b'{"status":"alive"}', request_id)

    async def _ready(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """200 while every model has a ready replica and nothing drains; else 503 with what is missing."""
        table = self._admission.table
        missing = [m.name for m in table.models if not ready_replicas(table.replicas, m.name)]
        replicas = {row.id: row.state.value for row in table.replicas}
        is_ready = bool(table.models) and not missing and not table.draining
        status = "ready" if is_ready else "draining" if table.draining else "not ready"
        value = {"status": status, "replicas": replicas, "models_not_ready": missing}
        headers = {} if is_ready else {"Retry-After": "5"}
        return json_response(200 if is_ready else 503, orjson.dumps(value), request_id, headers)

    async def _metrics_text(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        table = self._admission.table
        self._metrics.in_flight.clear()
        self._metrics.queued.clear()
        self._metrics.ready.clear()
        for row in table.replicas:
            self._metrics.in_flight.labels(row.id).set(self._admission.in_flight.get(row.id, 0))
            self._metrics.ready.labels(row.model, row.id).set(row.state is State.READY)
        for model in table.models:
            self._metrics.queued.labels(model.name).set(self._admission.queued.get(model.name, 0))
        record, is_here = await self._dashboard.record()
        asked = [row for row in table.replicas if row.endpoint is not None and row.state is State.READY]
        texts = await asyncio.gather(
            *(get_text(row.endpoint, "/metrics", _ENGINE_METRICS_TIMEOUT_S) for row in asked if row.endpoint)
        )
        engines = merged(
            with_labels(text, {"model": row.model, "replica": row.id})
            for row, text in zip(asked, texts, strict=True)
            if text
        )
        return web.Response(
            text=self._metrics.own_text() + rack_text(record, supervisor_answers=is_here) + engines,
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "x-request-id": request_id},
        )
