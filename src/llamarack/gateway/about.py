"""What the gateway tells of itself: models, version, health, and the metrics of the whole rack."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from llamarack.errors import ModelNotFound
from llamarack.gateway.admission import Admission
from llamarack.gateway.asked import Asked, send_json
from llamarack.gateway.dashboard import Dashboard
from llamarack.gateway.metrics import Metrics, merged, summed, with_labels
from llamarack.gateway.rack_metrics import rack_text
from llamarack.gateway.upstream import get_text
from llamarack.supervise.state import State
from llamarack.supervise.table import ModelRow
from llamarack.version import __version__

if TYPE_CHECKING:
    from llamarack.gateway.keys import Key

_ENGINE_METRICS_TIMEOUT_S = 2.0

Peers = Callable[[], Awaitable[list[str]]]
Served = Callable[["Key | None"], dict[str, ModelRow]]


class About:
    """`peers`: the counters of the other workers; `served`: the models that a key may use."""

    def __init__(
        self, admission: Admission, metrics: Metrics, dashboard: Dashboard, peers: Peers | None, served: Served
    ) -> None:
        self._admission = admission
        self._metrics = metrics
        self._dashboard = dashboard
        self._peers = peers
        self._served = served

    # -- what is served -----------------------------------------------------------------------------------------

    async def models(self, asked: Asked) -> None:
        rows = [self._model_object(model) for model in self._served(asked.key).values()]
        send_json(asked, 200, {"object": "list", "data": rows})

    async def one_model(self, asked: Asked) -> None:
        name = asked.path.removeprefix("/models/")
        served = self._served(asked.key)
        if name not in list(served):
            raise ModelNotFound(f"the model `{name}` is not served here; served: {', '.join(served)}", param="model")
        send_json(asked, 200, self._model_object(served[name]))

    def _model_object(self, model: ModelRow) -> dict[str, Any]:
        rows = [row for row in self._admission.table.replicas if row.model == model.name]
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_unix_s,
            "owned_by": "llamarack",
            "max_model_len": min((row.context_tokens for row in rows), default=None),
        }

    async def version(self, asked: Asked) -> None:
        send_json(asked, 200, {"version": __version__})

    # -- health -------------------------------------------------------------------------------------------------

    async def live(self, asked: Asked) -> None:
        send_json(asked, 200, {"status": "alive"})

    async def ready(self, asked: Asked) -> None:
        """200 while every model has a ready replica and nothing drains; else 503 with what is missing."""
        table = self._admission.table
        missing = [model.name for model in table.models if not self._admission.ready(model.name)]
        replicas = {row.id: row.state.value for row in table.replicas}
        is_ready = bool(table.models) and not missing and not table.draining
        status = "ready" if is_ready else "draining" if table.draining else "not ready"
        value = {"status": status, "replicas": replicas, "models_not_ready": missing}
        send_json(asked, 200 if is_ready else 503, value, {} if is_ready else {"Retry-After": "5"})

    async def metrics_text(self, asked: Asked) -> None:
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


async def _nobody() -> list[str]:
    return []
