"""What one gateway worker answers: paths, request ids, envelopes on every way out."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamarack.config import Gateway
from llamarack.errors import (
    BadRequest,
    DeadlineExceeded,
    LlamarackError,
    MethodNotAllowed,
    NotFound,
    NotReady,
    RequestError,
    RequestTooSlow,
)
from llamarack.gateway import body as bodies
from llamarack.gateway import wire
from llamarack.gateway.about import About, Peers
from llamarack.gateway.access_log import AccessLog, Entry
from llamarack.gateway.admission import Admission
from llamarack.gateway.asked import Asked, refuse, send_json
from llamarack.gateway.dashboard import PAGE_PATHS, STATUS_PATH, Dashboard
from llamarack.gateway.engine_watch import EngineWatch
from llamarack.gateway.exchange import Exchange, HttpServer, OpenExchange, offers_websocket, waits_to_continue
from llamarack.gateway.generation import SHAPES, Generation
from llamarack.gateway.ids import new_id
from llamarack.gateway.ids import request_id as id_of
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.quota import Quotas
from llamarack.gateway.relay import Relay
from llamarack.gateway.tokens import detokenize, tokenize
from llamarack.supervise.table import ReplicaRow

if TYPE_CHECKING:
    from llamarack.gateway.keys import Key, KeyFile, Keys

# For a first head and for a whole body: 32 MiB at 4.5 Mbit/s. Without, a byte now and then holds a connection for ever.
_SENDING_TIMEOUT_S = 60.0
_PREFIX = re.compile(r"^(?:/v1)+(?=/|$)")
_AZURE = re.compile(r"^/openai/(?:deployments/(?P<name>[^/]+(?:/[^/]+)*?)(?=/(?:chat/)?completions$|/embeddings$)|v1)")
_KEPT_PATHS = 256
_HEALTH_PATHS = {"/live", "/livez", "/ready", "/readyz", "/health"}
HTTP_VARIABLE = "LLAMARACK_GATEWAY_HTTP"

log = logging.getLogger(__name__)

Handler = Callable[[Asked], Awaitable[None]]
SmallRequest = Callable[[ReplicaRow, dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(slots=True, eq=False)
class _Known:
    """What follows from a head alone. `id`: the request id that it brings. `key`: as found in `keys`, which are those
    of the file as long as they are the same object."""

    path: str
    deployment: str | None
    id: str | None
    is_generation: bool  # and nothing about it is unusual
    keys: KeyFile | None = None
    key: Key | None = None


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
        self._keys = keys
        self._dashboard = dashboard or Dashboard(None)
        self._quotas = quotas or Quotas(admission, time.time)
        self._access = access or AccessLog(settings.access_log)
        self._relay = Relay(settings, admission, metrics, self.watch, stuck_request_s)
        self._generation = Generation(settings, admission, metrics, self._quotas, self._relay)
        self.outcomes = self._relay.outcomes
        self.watch.has_learned = lambda model: self._generation.learned_of(model).is_settled
        self._paths: dict[str, tuple[str, str | None]] = {}
        self._sending_timeout_s = min(_SENDING_TIMEOUT_S, settings.request_timeout_s)
        about = self._about = About(admission, metrics, self._dashboard, peers, self._generation.served)
        self._routes: dict[str, dict[str, Handler]] = {
            "/live": {"GET": about.live},
            "/livez": {"GET": about.live},
            "/ready": {"GET": about.ready},
            "/readyz": {"GET": about.ready},
            "/health": {"GET": about.ready},
            "/metrics": {"GET": about.metrics_text},
            "/version": {"GET": about.version},
            STATUS_PATH: {"GET": self._dashboard_status},
            "/models": {"GET": about.models},
            **{path: {"POST": self._generate} for path in SHAPES},
            "/embeddings": {"POST": self._embeddings},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
        }

    def apply(self, settings: Gateway, keys: Keys | None) -> None:
        """Other limits for the requests to come, after a reload."""
        self._settings = self._relay.settings = self._generation.settings = settings
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

        return FastServer(self.handle, opens=self.open, **limits)

    def close(self) -> None:
        self._relay.close()
        self._quotas.save()
        self._access.flush()

    def save(self) -> None:
        self._quotas.save()

    # -- by a task ----------------------------------------------------------------------------------------------

    async def handle(self, exchange: Exchange) -> None:
        asked = Asked(exchange, id_of(exchange.headers.get("x-request-id", "")), time.monotonic())
        if offers_websocket(exchange):
            exchange.closing = True  # a client that takes what follows for another protocol must be told
        await self._finish(asked, self._answer(asked))

    async def _finish(self, asked: Asked, answering: Awaitable[None]) -> None:
        """Sees to it that there is an answer, and a line in the log."""
        exchange = asked.exchange
        has_left = False
        try:
            await answering
        except RequestError as error:
            if error.http_status == RequestTooSlow.http_status:
                exchange.closing = True
            refuse(exchange, error, asked.request_id)
        except asyncio.CancelledError:
            has_left = True  # perhaps after its 200
            raise
        except Exception:
            log.exception("unexpected request=%s path=%s", asked.request_id, exchange.target)
            refuse(exchange, LlamarackError("the gateway met a fault of its own"), asked.request_id)
        finally:
            self._note(asked, 499 if has_left or exchange.status is None else exchange.status)

    async def _answer(self, asked: Asked) -> None:
        exchange = asked.exchange
        path = exchange.path
        if path in PAGE_PATHS and exchange.method in {"GET", "HEAD"}:
            self._dashboard.page(exchange, asked.request_id)
            return
        asked.path, asked.deployment = self._route(path)
        if self._keys is not None and asked.path not in _HEALTH_PATHS:
            asked.key = self._keys.require(exchange.headers)
        methods = self._routes.get(asked.path)
        if methods is None and asked.path.startswith("/models/"):
            methods = {"GET": self._about.one_model}
        if methods is None:
            raise NotFound(f"the path `{exchange.path}` is not known here", hint="POST /v1/chat/completions")
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join(methods)
            refusal = MethodNotAllowed(f"`{exchange.path}` takes {allowed}, {exchange.method} given")
            refuse(exchange, refusal, asked.request_id, {"Allow": allowed})
            return
        if waits_to_continue(exchange):
            exchange.go_on()
        await handler(asked)

    def _route(self, path: str) -> tuple[str, str | None]:
        route = self._paths.get(path)
        if route is None:
            route = _route(path)
            if len(self._paths) < _KEPT_PATHS:
                self._paths[path] = route
        return route

    # -- without one --------------------------------------------------------------------------------------------

    def open(self, exchange: OpenExchange) -> bool:
        """True for a request that is on its way to an engine. Of all others, refused ones too, a task sees to."""
        known = exchange.head.kept
        if not isinstance(known, _Known):
            known = exchange.head.kept = self._known(exchange)
        if not known.is_generation:
            return False
        try:
            key = self._key_of(known, exchange) if self._keys is not None else None
            asked = Asked(exchange, known.id or new_id(), time.monotonic(), known.path, key, known.deployment)
            return self._generation.begin(asked, exchange, self._over, self._finish)
        except RequestError:
            return False
        except Exception:
            log.exception("unexpected path=%s", exchange.target)
            if exchange.on_left is not None:  # gives back what it holds
                exchange.on_left()
                exchange.on_left = None
            return False

    def _known(self, exchange: OpenExchange) -> _Known:
        path, deployment = self._route(exchange.path)
        given = exchange.headers.get("x-request-id", "")
        usual = path in SHAPES and exchange.method == "POST" and "upgrade" not in exchange.headers
        usual = usual and "expect" not in exchange.headers and _is_json_as_it_is(exchange)
        return _Known(path, deployment, given if given and id_of(given) == given else None, usual)

    def _key_of(self, known: _Known, exchange: Exchange) -> Key:
        """Raises Unauthorized."""
        assert self._keys is not None
        valid = self._keys.refresh()
        if known.key is None or known.keys is not valid:
            known.key = self._keys.require(exchange.headers)
            known.keys = valid
        return known.key

    def _over(self, asked: Asked, code: str) -> None:
        self._note(asked, int(code))

    def _note(self, asked: Asked, status: int) -> None:
        if not self._access.is_on:
            return
        exchange, call = asked.exchange, asked.call
        if exchange.path == STATUS_PATH and status == 200:  # a page that looks every second would fill the log
            return
        # The target is still percent-encoded: a line break in it makes no line in the log.
        entry = Entry(
            method=exchange.method,
            target=exchange.target,
            request_id=asked.request_id,
            status=status,
            seconds=time.monotonic() - asked.arrived_monotonic_s,
            caller=asked.key.name if asked.key is not None else None,
        )
        if call is not None and call.is_accounted:
            entry.model, entry.replica, entry.queue_s = call.model, call.replica, call.queue_s
            entry.first_token_s, entry.per_token_s = call.first_event_s, call.per_token_s
            entry.prompt_tokens, entry.generated_tokens = call.prompt_tokens, call.generated_tokens
        self._access.note(entry)

    # -- endpoints ----------------------------------------------------------------------------------------------

    async def _generate(self, asked: Asked) -> None:
        await self._generation.generate(asked, await self._body(asked.exchange))

    async def _embeddings(self, asked: Asked) -> None:
        await self._generation.embed(asked, await self._body(asked.exchange))

    async def _tokenize(self, asked: Asked) -> None:
        await self._small(asked, tokenize)

    async def _detokenize(self, asked: Asked) -> None:
        await self._small(asked, detokenize)

    async def _small(self, asked: Asked, ask: SmallRequest) -> None:
        """An answer without generated tokens, from any ready replica: it takes no slot."""
        value = bodies.parse_object(await self._body(asked.exchange))
        model = bodies.resolve_model(value, self._generation.served(asked.key), asked.deployment)
        ready = self._admission.ready(model)
        if not ready:
            raise NotReady(f"the model `{model}` is not ready yet", retry_after_s=5)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                send_json(asked, 200, await ask(ready[0], value))
        except TimeoutError:
            raise DeadlineExceeded(f"not finished within {self._settings.request_timeout_s:g} s") from None

    async def _body(self, exchange: Exchange) -> bytes:
        kind, coding = _kind(exchange), _coding(exchange)
        if kind in _FORMS:
            raise BadRequest(f"the body is `{kind}`", hint="send Content-Type: application/json")
        if coding not in _PLAIN:
            raise BadRequest(f"the body is compressed (`{coding[:40]}`)", hint="send it as it is")
        return await exchange.body(self._sending_timeout_s)

    async def _dashboard_status(self, asked: Asked) -> None:
        headers = {"Content-Type": wire.JSON_TYPE, "x-request-id": asked.request_id}
        headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        asked.exchange.answer(200, headers, await self._dashboard.status())


_FORMS = frozenset({"application/x-www-form-urlencoded", "multipart/form-data"})
_PLAIN = frozenset({"identity", ""})


def _kind(exchange: Exchange) -> str:
    return exchange.headers.get("content-type", "").partition(";")[0].strip().lower()


def _coding(exchange: Exchange) -> str:
    return exchange.headers.get("content-encoding", "identity").strip().lower()


def _is_json_as_it_is(exchange: Exchange) -> bool:
    return _kind(exchange) not in _FORMS and _coding(exchange) in _PLAIN


def _route(path: str) -> tuple[str, str | None]:
    """The one form of a path, and the model that an Azure path names."""
    azure = _AZURE.match(path)
    if azure is not None:
        path = path[azure.end() :]
    return _PREFIX.sub("", path).rstrip("/") or "/", azure["name"] if azure is not None else None
