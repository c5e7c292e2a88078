"""What one gateway worker answers: paths, request ids, envelopes on every way out."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from llamarack.config import Gateway
from llamarack.engine.dialects import DIALECTS
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
from llamarack.gateway import wire
from llamarack.gateway.access_log import AccessLog, Entry
from llamarack.gateway.admission import Admission
from llamarack.gateway.dashboard import PAGE_PATHS, STATUS_PATH, Dashboard
from llamarack.gateway.deadlines import deadlines
from llamarack.gateway.demand import Demand, Learned
from llamarack.gateway.embeddings import checked_embeddings, embeddings_answer
from llamarack.gateway.engine_watch import EngineWatch
from llamarack.gateway.exchange import Exchange, HttpServer, offers_websocket, waits_to_continue
from llamarack.gateway.gathered import as_stream
from llamarack.gateway.ids import request_id as id_of
from llamarack.gateway.metrics import Metrics, merged, summed, with_labels
from llamarack.gateway.quota import Quotas
from llamarack.gateway.rack_metrics import rack_text
from llamarack.gateway.relay import Call, Relay
from llamarack.gateway.routing import session_of
from llamarack.gateway.sizing import sized
from llamarack.gateway.tokens import detokenize, tokenize
from llamarack.gateway.upstream import get_text
from llamarack.supervise.state import State
from llamarack.supervise.table import ModelRow, ReplicaRow
from llamarack.version import __version__

if TYPE_CHECKING:
    from llamarack.gateway.keys import Key, Keys

# For a first head and for a whole body: 32 MiB at 4.5 Mbit/s. Without, a byte now and then holds a connection for ever.
_SENDING_TIMEOUT_S = 60.0
_ENGINE_METRICS_TIMEOUT_S = 2.0
_PREFIX = re.compile(r"^(?:/v1)+(?=/|$)")
_AZURE = re.compile(r"^/openai/(?:deployments/(?P<name>[^/]+(?:/[^/]+)*?)(?=/(?:chat/)?completions$|/embeddings$)|v1)")
_KEPT_PATHS = 256
_HEALTH_PATHS = {"/live", "/livez", "/ready", "/readyz", "/health"}
HTTP_VARIABLE = "LLAMARACK_GATEWAY_HTTP"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request once its path is known. `deployment`: the model that an Azure path names."""

    exchange: Exchange
    request_id: str
    path: str
    key: Key | None
    deployment: str | None
    entry: Entry


Handler = Callable[[Asked], Awaitable[None]]
SmallRequest = Callable[[ReplicaRow, dict[str, Any]], Awaitable[dict[str, Any]]]
Peers = Callable[[], Awaitable[list[str]]]


class GatewayServer:
    """Built once per worker; `handle` is called for every request. `peers`: the counters of the other workers."""

    def __init__(
        self,
        settings: Gateway,
        admission: Admission,
        metrics: Metrics,
        keys: Keys | None,
        dashboard: Dashboard | None = None,
        *,
        quotas: Quotas | None = None,
        stuck_request_s: float = 300.0,
        access: AccessLog | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.watch = EngineWatch(admission, stuck_request_s)
        self._settings = settings
        self._admission = admission
        self._metrics = metrics
        self._keys = keys
        self._dashboard = dashboard or Dashboard(None)
        self._quotas = quotas or Quotas(admission, time.time)
        self._access = access or AccessLog(settings.access_log)
        self._peers = peers
        self._relay = Relay(settings, admission, metrics, self.watch, stuck_request_s)
        self.outcomes = self._relay.outcomes
        self._learned: dict[str, Learned] = {}
        self.watch.has_learned = lambda model: self._learned_of(model).is_settled
        self._paths: dict[str, tuple[str, str | None]] = {}
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
            "/responses": {"POST": self._generate},
            "/embeddings": {"POST": self._embeddings},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
        }

    def apply(self, settings: Gateway, keys: Keys | None) -> None:
        """Other limits for the requests to come, after a reload."""
        self._settings = self._relay.settings = settings
        self._keys = keys
        self._sending_timeout_s = min(_SENDING_TIMEOUT_S, settings.request_timeout_s)

    def protocol_factory(self, *, http: str | None = None) -> HttpServer:
        """`http`: `fast` or `aiohttp`; None: what LLAMARACK_GATEWAY_HTTP says, else fast."""
        # Imported here, so that a worker holds one of them.
        limits = {"keep_alive_s": self._settings.keep_alive_s, "head_timeout_s": self._sending_timeout_s}
        if (http or os.environ.get(HTTP_VARIABLE, "fast")) == "aiohttp":
            from llamarack.gateway.http_aiohttp import AiohttpServer

            return AiohttpServer(self.handle, **limits)
        from llamarack.gateway.http_server import FastServer

        return FastServer(self.handle, **limits)

    def close(self) -> None:
        self._relay.close()
        self._quotas.save()
        self._access.flush()

    def save(self) -> None:
        self._quotas.save()

    async def handle(self, exchange: Exchange) -> None:
        started = time.monotonic()
        has_left = False
        request_id = id_of(exchange.headers.get("x-request-id", ""))
        # The target is still percent-encoded: a line break in it makes no line in the log.
        entry = Entry(method=exchange.method, target=exchange.target, request_id=request_id, status=499, seconds=0.0)
        if offers_websocket(exchange):
            exchange.closing = True  # a client that takes what follows for another protocol must be told
        try:
            await self._answer(exchange, request_id, entry)
        except RequestError as error:
            if error.http_status == RequestTooSlow.http_status:
                exchange.closing = True
            _refuse(exchange, error, request_id)
        except asyncio.CancelledError:
            has_left = True  # perhaps after its 200
            raise
        except Exception:
            log.exception("unexpected request=%s path=%s", request_id, exchange.target)
            _refuse(exchange, LlamarackError("the gateway met a fault of its own"), request_id)
        finally:
            entry.status = 499 if has_left or exchange.status is None else exchange.status
            entry.seconds = time.monotonic() - started
            if exchange.path != STATUS_PATH or entry.status != 200:  # a page that looks every second would fill the log
                self._access.note(entry)

    async def _answer(self, exchange: Exchange, request_id: str, entry: Entry) -> None:
        path = exchange.path
        if path in PAGE_PATHS and exchange.method in {"GET", "HEAD"}:
            self._dashboard.page(exchange, request_id)
            return
        route = self._paths.get(path)
        if route is None:
            route = _route(path)
            if len(self._paths) < _KEPT_PATHS:
                self._paths[path] = route
        path, deployment = route
        key = None
        if self._keys is not None and path not in _HEALTH_PATHS:
            key = self._keys.require(exchange.headers)
            entry.caller = key.name
        methods = self._routes.get(path)
        if methods is None and path.startswith("/models/"):
            methods = {"GET": self._one_model}
        if methods is None:
            raise NotFound(f"the path `{exchange.path}` is not known here", hint="POST /v1/chat/completions")
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join(methods)
            refusal = MethodNotAllowed(f"`{exchange.path}` takes {allowed}, {exchange.method} given")
            _refuse(exchange, refusal, request_id, {"Allow": allowed})
            return
        if waits_to_continue(exchange):
            exchange.go_on()
        await handler(
            Asked(exchange=exchange, request_id=request_id, path=path, key=key, deployment=deployment, entry=entry)
        )

    # -- generation ---------------------------------------------------------------------------------------------

    async def _generate(self, asked: Asked) -> None:
        arrived = time.monotonic()
        raw = await self._body(asked.exchange)
        served = self._served(asked.key)
        parsed = bodies.parse(raw, served, shape=_SHAPES[asked.path], deployment=asked.deployment)
        model = served[parsed.model]
        rows = self._admission.ready(parsed.model)
        bodies.require_supported(parsed.value, asked.path, rows)
        learned = self._learned_of(parsed.model)
        size = await sized(raw, parsed, model, rows, learned, self._admission.pools)
        body = bodies.for_engine(raw, parsed, model, room_tokens=size.room_tokens)
        await self._relayed(
            Call(
                exchange=asked.exchange,
                request_id=asked.request_id,
                model=parsed.model,
                engine_path="/v1" + asked.path,
                body=body,
                stream_body=None if _all_end_whole_answers(rows) else as_stream(body, parsed),
                shape=parsed.shape,
                stream=parsed.stream,
                hide_usage=parsed.stream and not parsed.wants_usage,
                demand=Demand(
                    caller=asked.key.name if asked.key else "",
                    tokens=size.tokens,
                    slots=parsed.choices,
                    session=self._session(asked.exchange.headers, parsed.value),
                ),
                deadlines=deadlines(
                    asked.exchange.headers, self._settings, stream=parsed.stream, usual_s=learned.usual_s
                ),
                arrived_monotonic_s=arrived,
                asked_bytes=len(raw),
                fields=[name for name in parsed.value if name not in _PLAIN_FIELDS],
            ),
            asked,
        )

    async def _relayed(self, call: Call, asked: Asked) -> None:
        key, metrics = asked.key, self._metrics
        if key is not None:
            self._quotas.require_model(key, call.model)
            try:
                self._quotas.enter(key)
            except RequestError as error:
                metrics.child(metrics.rejected, call.model, error.code).inc()
                raise
        code = "499"
        try:
            await self._relay.serve(call)
            code = str(call.exchange.status)
        except RequestError as error:
            code = str(error.http_status)
            metrics.child(metrics.rejected, call.model, error.code).inc()
            raise
        except asyncio.CancelledError:
            metrics.child(metrics.cancelled, call.model).inc()
            raise
        finally:
            self._account(call, code, asked)

    def _account(self, call: Call, code: str, asked: Asked) -> None:
        metrics, model, entry = self._metrics, call.model, asked.entry
        seconds = time.monotonic() - call.arrived_monotonic_s
        prompt, made = _count(call.usage, "prompt_tokens"), _count(call.usage, "completion_tokens")
        metrics.child(metrics.requests, model, code).inc()
        metrics.child(metrics.duration, model).observe(seconds)
        entry.model, entry.replica, entry.queue_s = model, call.replica, call.queue_s
        if call.first_event_s is not None:
            metrics.child(metrics.first_token, model).observe(call.first_event_s)
            entry.first_token_s = call.first_event_s
            if made and made > 1 and call.last_event_s is not None:
                entry.per_token_s = (call.last_event_s - call.first_event_s) / (made - 1)
                metrics.child(metrics.per_token, model).observe(entry.per_token_s)
        if prompt is not None:
            metrics.child(metrics.prompt_tokens, model).inc(prompt)
            entry.prompt_tokens = prompt
        if made is not None:
            metrics.child(metrics.generated_tokens, model).inc(made)
            entry.generated_tokens = made
        if code == "200" and prompt is not None and call.sent_monotonic_s is not None:
            since_sent = call.sent_monotonic_s - call.arrived_monotonic_s
            worked_s = (seconds if call.first_event_s is None else call.first_event_s) - since_sent
            self._learned_of(model).note(
                body_bytes=call.asked_bytes, prompt_tokens=prompt, output_tokens=made or 0, seconds=max(0.0, worked_s)
            )
        # For the dashboard: what the events of a stream let one think is put right by the engine's own count.
        if made is not None:
            metrics.traffic.count_tokens(model, made - call.streamed_events)
        metrics.traffic.count_request(
            model, failed=code.startswith("5"), first_token_s=entry.first_token_s, per_token_s=entry.per_token_s
        )
        if asked.key is not None:
            metrics.child(metrics.key_tokens, asked.key.name, model).inc((prompt or 0) + (made or 0))
            self._quotas.leave(asked.key, prompt or 0, made or 0)

    def _learned_of(self, model: str) -> Learned:
        known = self._learned.get(model)
        if known is None:
            known = self._learned[model] = Learned()
        return known

    async def _embeddings(self, asked: Asked) -> None:
        arrived = time.monotonic()
        raw = await self._body(asked.exchange)
        served = self._served(asked.key)
        value = checked_embeddings(bodies.parse_object(raw))
        model = bodies.resolve_model(value, served, asked.deployment)
        bodies.require_supported(value, asked.path, self._admission.ready(model))
        learned = self._learned_of(model)
        call = Call(
            exchange=embeddings_answer(asked.exchange, value, model),
            request_id=asked.request_id,
            model=model,
            engine_path="/v1/embeddings",
            body=raw,
            shape="whole",
            stream=False,
            hide_usage=False,
            demand=Demand(
                caller=asked.key.name if asked.key else "",
                tokens=learned.prompt_tokens(len(raw)),
                session=self._session(asked.exchange.headers, value),
            ),
            deadlines=deadlines(asked.exchange.headers, self._settings, stream=False, usual_s=0.0),
            arrived_monotonic_s=arrived,
            asked_bytes=len(raw),
        )
        await self._relayed(call, asked)

    async def _tokenize(self, asked: Asked) -> None:
        await self._small(asked, tokenize)

    async def _detokenize(self, asked: Asked) -> None:
        await self._small(asked, detokenize)

    async def _small(self, asked: Asked, ask: SmallRequest) -> None:
        """An answer without generated tokens, from any ready replica: it takes no slot."""
        value = bodies.parse_object(await self._body(asked.exchange))
        model = bodies.resolve_model(value, self._served(asked.key), asked.deployment)
        ready = self._admission.ready(model)
        if not ready:
            raise NotReady(f"the model `{model}` is not ready yet", retry_after_s=5)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                _send_json(asked, 200, await ask(ready[0], value))
        except TimeoutError:
            raise DeadlineExceeded(f"not finished within {self._settings.request_timeout_s:g} s") from None

    async def _body(self, exchange: Exchange) -> bytes:
        kind = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in {"application/x-www-form-urlencoded", "multipart/form-data"}:
            raise BadRequest(f"the body is `{kind}`", hint="send Content-Type: application/json")
        coding = exchange.headers.get("content-encoding", "identity").strip().lower()
        if coding not in {"identity", ""}:
            raise BadRequest(f"the body is compressed (`{coding[:40]}`)", hint="send it as it is")
        return await exchange.body(self._sending_timeout_s)

    def _session(self, headers: Mapping[str, str], value: dict[str, Any]) -> bytes | None:
        return session_of(headers, value) if self._settings.routing == "session" else None

    # -- what is served -----------------------------------------------------------------------------------------

    def _served(self, key: Key | None) -> dict[str, ModelRow]:
        """Those that this key may use; a key without a list may use all."""
        models = {model.name: model for model in self._admission.table.models}
        return models if key is None or key.models is None else _Permitted(models, key.models)

    async def _models(self, asked: Asked) -> None:
        rows = [self._model_object(model) for model in self._served(asked.key).values()]
        _send_json(asked, 200, {"object": "list", "data": rows})

    async def _one_model(self, asked: Asked) -> None:
        name = asked.path.removeprefix("/models/")
        served = self._served(asked.key)
        if name not in list(served):
            raise ModelNotFound(f"the model `{name}` is not served here; served: {', '.join(served)}", param="model")
        _send_json(asked, 200, self._model_object(served[name]))

    def _model_object(self, model: ModelRow) -> dict[str, Any]:
        rows = [row for row in self._admission.table.replicas if row.model == model.name]
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_unix_s,
            "owned_by": "llamarack",
            "max_model_len": min((row.context_tokens for row in rows), default=None),
        }

    async def _version(self, asked: Asked) -> None:
        _send_json(asked, 200, {"version": __version__})

    async def _dashboard_status(self, asked: Asked) -> None:
        headers = {"Content-Type": wire.JSON_TYPE, "x-request-id": asked.request_id}
        headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        asked.exchange.answer(200, headers, await self._dashboard.status())

    # -- health -------------------------------------------------------------------------------------------------

    async def _live(self, asked: Asked) -> None:
        _send_json(asked, 200, {"status": "alive"})

    async def _ready(self, asked: Asked) -> None:
        """200 while every model has a ready replica and nothing drains; else 503 with what is missing."""
        table = self._admission.table
        missing = [model.name for model in table.models if not self._admission.ready(model.name)]
        replicas = {row.id: row.state.value for row in table.replicas}
        is_ready = bool(table.models) and not missing and not table.draining
        status = "ready" if is_ready else "draining" if table.draining else "not ready"
        value = {"status": status, "replicas": replicas, "models_not_ready": missing}
        _send_json(asked, 200 if is_ready else 503, value, {} if is_ready else {"Retry-After": "5"})

    async def _metrics_text(self, asked: Asked) -> None:
        self._set_state()
        rows = [r for r in self._admission.table.replicas if r.endpoint is not None and r.state is State.READY]
        others, texts, (record, is_here) = await asyncio.gather(
            self._peers() if self._peers is not None else _nobody(),
            asyncio.gather(*(get_text(r.endpoint, "/metrics", _ENGINE_METRICS_TIMEOUT_S) for r in rows if r.endpoint)),
            self._dashboard.record(),
        )
        engines = merged(
            with_labels(text, {"model": row.model, "replica": row.id})
            for row, text in zip(rows, texts, strict=True)
            if text
        )
        own = self._metrics.state_text() + summed([self._metrics.counted_text(), *others])
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "x-request-id": asked.request_id}
        rack = rack_text(record, supervisor_answers=is_here)
        asked.exchange.answer(200, headers, (own + rack + engines).encode())

    def _set_state(self) -> None:
        """Over all workers."""
        table, metrics, admission = self._admission.table, self._metrics, self._admission
        for gauge in (metrics.in_flight, metrics.queued, metrics.ready, metrics.slots, metrics.overcommit):
            gauge.clear()
        for row in table.replicas:
            in_flight, stuck = admission.in_flight_of_all(row.id), admission.stuck_of_all(row.id)
            metrics.in_flight.labels(row.id).set(in_flight)
            metrics.ready.labels(row.model, row.id).set(row.state is State.READY)
            slots = {"busy": in_flight - stuck, "stuck": stuck, "idle": max(0, row.slots - in_flight)}
            if row.state is not State.READY:
                slots["idle"] = 0
            for state, count in slots.items():
                metrics.slots.labels(row.model, row.id, state).set(count)
            pool = admission.pools.get(row.endpoint.key) if row.endpoint is not None else None
            if pool is not None:
                metrics.overcommit.labels(row.model, row.id).set(pool.overcommit)
        for model in table.models:
            metrics.queued.labels(model.name).set(admission.queued_of_all(model.name))


# Words that a message may hold without being about the field.
_PLAIN_FIELDS = frozenset({"model", "prompt", "messages", "input", "stream", "n", "user", "stop", "tools", "store"})
_SHAPES = {"/chat/completions": "chat", "/completions": "text", "/responses": "responses"}


class _Permitted(dict[str, ModelRow]):
    """Lists only what a key may use, but knows all, so that a model which is there is refused as forbidden and not as
    unknown."""

    def __init__(self, models: dict[str, ModelRow], names: list[str]) -> None:
        super().__init__({name: row for name, row in models.items() if name in names})
        self._all = models

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def __missing__(self, name: str) -> ModelRow:
        return self._all[name]


def _route(path: str) -> tuple[str, str | None]:
    """The one form of a path, and the model that an Azure path names."""
    azure = _AZURE.match(path)
    if azure is not None:
        path = path[azure.end() :]
    return _PREFIX.sub("", path).rstrip("/") or "/", azure["name"] if azure is not None else None


async def _nobody() -> list[str]:
    return []


def _all_end_whole_answers(rows: Sequence[ReplicaRow]) -> bool:
    return bool(rows) and all(DIALECTS[row.engine].deviations.ends_whole_answers for row in rows)


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) else None


def _send_json(asked: Asked, status: int, value: dict[str, Any], headers: Mapping[str, str] | None = None) -> None:
    head = {"Content-Type": wire.JSON_TYPE, "x-request-id": asked.request_id, **(headers or {})}
    asked.exchange.answer(status, head, orjson.dumps(value))


def _refuse(
    exchange: Exchange, error: LlamarackError, request_id: str, headers: Mapping[str, str] | None = None
) -> None:
    if exchange.status is not None:
        exchange.abort()  # a begun answer must not look whole
        return
    if waits_to_continue(exchange):
        exchange.closing = True  # where its body never comes, what comes next would be taken for it
    head = {"Content-Type": wire.JSON_TYPE, "x-request-id": request_id, **wire.error_headers(error), **(headers or {})}
    exchange.answer(error.http_status, head, wire.error_body(error))
