"""Requests for generated tokens: read, sized, sent on their way, and put to account when they are over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamarack.config import Gateway
from llamarack.engine.dialects import DIALECTS
from llamarack.errors import RequestError
from llamarack.gateway import body as bodies
from llamarack.gateway.admission import Admission
from llamarack.gateway.asked import Asked
from llamarack.gateway.calls import Call
from llamarack.gateway.deadlines import Deadlines, deadlines
from llamarack.gateway.demand import Demand, Learned
from llamarack.gateway.direct import Begun, Direct
from llamarack.gateway.embeddings import checked_embeddings, embeddings_answer
from llamarack.gateway.exchange import OpenExchange
from llamarack.gateway.gathered import as_stream
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.quota import Quotas
from llamarack.gateway.relay import Relay
from llamarack.gateway.routing import session_of
from llamarack.gateway.sizing import Size, counted, estimated
from llamarack.supervise.table import ModelRow, ReplicaRow, Table

if TYPE_CHECKING:
    from llamarack.gateway.keys import Key

SHAPES = {"/chat/completions": "chat", "/completions": "text", "/responses": "responses"}
# Words that a message may hold without being about the field.
_PLAIN_FIELDS = frozenset({"model", "prompt", "messages", "input", "stream", "n", "user", "stop", "tools", "store"})

Finish = Callable[[Asked, Awaitable[None]], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Served:
    """What the table says of one model, worked out once. `dropped`: by path, fields that some engine drops silently."""

    row: ModelRow
    ready: Sequence[ReplicaRow]
    all_end_whole_answers: bool
    dropped: dict[str, frozenset[str]]


class Generation:
    """Owns what was learned of each model's requests."""

    def __init__(self, settings: Gateway, admission: Admission, metrics: Metrics, quotas: Quotas, relay: Relay) -> None:
        self.settings = settings
        self._admission = admission
        self._metrics = metrics
        self._quotas = quotas
        self._relay = relay
        self._learned: dict[str, Learned] = {}
        self._table: Table | None = None
        self._all_rows: dict[str, ModelRow] = {}
        self._served_as: dict[str, _Served] = {}

    def learned_of(self, model: str) -> Learned:
        known = self._learned.get(model)
        if known is None:
            known = self._learned[model] = Learned()
        return known

    def served(self, key: Key | None) -> dict[str, ModelRow]:
        """Those that this key may use; a key without a list may use all."""
        table = self._admission.table
        if table is not self._table:
            self._table = table
            self._all_rows = {model.name: model for model in table.models}
            self._served_as = {model.name: self._served(model) for model in table.models}
        models = self._all_rows
        return models if key is None or key.models is None else _Permitted(models, key.models)

    # -- by a task, and without ---------------------------------------------------------------------------------

    async def generate(self, asked: Asked, raw: bytes) -> None:
        parsed, served = self._read(asked, raw)
        learned, pools = self.learned_of(parsed.model), self._admission.pools
        size = estimated(len(raw), parsed, served.row, served.ready, learned, pools)
        if size is None:
            size = await counted(len(raw), parsed, served.row, served.ready, learned)
        await self._relayed(asked, self._call(asked, raw, parsed, served, learned, size))

    def begin(self, asked: Asked, exchange: OpenExchange, over: Callable[[Asked, str], None], finish: Finish) -> bool:
        """False: by a task, please, from the start. Else `over` is told when it is answered without one, or `finish` is
        asked to see to the rest. Raises RequestError."""
        raw = exchange.whole_body()
        parsed, served = self._read(asked, raw)
        learned = self.learned_of(parsed.model)
        size = estimated(len(raw), parsed, served.row, served.ready, learned, self._admission.pools)
        if size is None or not served.ready:
            return False
        call = self._call(asked, raw, parsed, served, learned, size)
        if asked.key is not None:
            self._quotas.require_model(asked.key, call.model)
            self._quotas.enter(asked.key)

        def account(code: str) -> None:
            self._account(call, code, asked.key)
            over(asked, code)

        async def rest(begun: Begun | None) -> None:
            await finish(asked, self._sent(asked, call, begun))

        Direct(self._relay, call, exchange, account, rest).start()
        return True

    def _served(self, model: ModelRow) -> _Served:
        rows = self._admission.ready(model.name)
        return _Served(
            model,
            rows,
            bool(rows) and all(DIALECTS[row.engine].deviations.ends_whole_answers for row in rows),
            {path: bodies.dropped_fields(path, rows) for path in SHAPES},
        )

    def _read(self, asked: Asked, raw: bytes) -> tuple[bodies.Parsed, _Served]:
        rows = self.served(asked.key)
        parsed = bodies.parse(raw, rows, shape=SHAPES[asked.path], deployment=asked.deployment)
        served = self._served_as[parsed.model]
        if not served.dropped[asked.path].isdisjoint(parsed.value):
            bodies.require_supported(parsed.value, asked.path, served.ready)
        return parsed, served

    def _call(
        self, asked: Asked, raw: bytes, parsed: bodies.Parsed, served: _Served, learned: Learned, size: Size
    ) -> Call:
        headers = asked.exchange.headers
        body = bodies.for_engine(raw, parsed, served.row, room_tokens=size.room_tokens)
        call = asked.call = Call(
            exchange=asked.exchange,
            request_id=asked.request_id,
            model=parsed.model,
            engine_path="/v1" + asked.path,
            body=body,
            stream_body=None if served.all_end_whole_answers else as_stream(body, parsed),
            shape=parsed.shape,
            stream=parsed.stream,
            hide_usage=parsed.stream and not parsed.wants_usage,
            demand=Demand(
                caller=asked.key.name if asked.key else "",
                tokens=size.tokens,
                slots=parsed.choices,
                session=self._session(headers, parsed.value),
            ),
            deadlines=self._deadlines(headers, stream=parsed.stream, usual_s=learned.usual_s),
            arrived_monotonic_s=asked.arrived_monotonic_s,
            asked_bytes=len(raw),
            fields=[name for name in parsed.value if name not in _PLAIN_FIELDS],
        )
        return call

    async def embed(self, asked: Asked, raw: bytes) -> None:
        value = checked_embeddings(bodies.parse_object(raw))
        model = bodies.resolve_model(value, self.served(asked.key), asked.deployment)
        bodies.require_supported(value, asked.path, self._admission.ready(model))
        call = asked.call = Call(
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
                tokens=self.learned_of(model).prompt_tokens(len(raw)),
                session=self._session(asked.exchange.headers, value),
            ),
            deadlines=self._deadlines(asked.exchange.headers, stream=False, usual_s=0.0),
            arrived_monotonic_s=asked.arrived_monotonic_s,
            asked_bytes=len(raw),
        )
        await self._relayed(asked, call)

    async def _relayed(self, asked: Asked, call: Call) -> None:
        if asked.key is not None:
            self._quotas.require_model(asked.key, call.model)
            try:
                self._quotas.enter(asked.key)
            except RequestError as error:
                self._metrics.rejected.add(1, call.model, error.code)
                raise
        await self._sent(asked, call, None)

    async def _sent(self, asked: Asked, call: Call, begun: Begun | None) -> None:
        """Of a request that its key has entered."""
        code = "499"
        try:
            await self._relay.serve(call, begun)
            code = str(call.exchange.status)
        except RequestError as error:
            code = str(error.http_status)
            self._metrics.rejected.add(1, call.model, error.code)
            raise
        except asyncio.CancelledError:
            self._metrics.cancelled.add(1, call.model)
            raise
        finally:
            self._account(call, code, asked.key)

    # -- the account --------------------------------------------------------------------------------------------

    def _account(self, call: Call, code: str, key: Key | None) -> None:
        metrics, model = self._metrics, call.model
        seconds = time.monotonic() - call.arrived_monotonic_s
        prompt, made = _count(call.usage, "prompt_tokens"), _count(call.usage, "completion_tokens")
        call.prompt_tokens, call.generated_tokens, call.is_accounted = prompt, made, True
        metrics.requests.add(1, model, code)
        metrics.duration.observe(model, seconds)
        first_s = call.first_event_s
        if first_s is not None:
            metrics.first_token.observe(model, first_s)
            if made and made > 1 and call.last_event_s is not None:
                call.per_token_s = (call.last_event_s - first_s) / (made - 1)
                metrics.per_token.observe(model, call.per_token_s)
        if prompt is not None:
            metrics.prompt_tokens.add(prompt, model)
        if made is not None:
            metrics.generated_tokens.add(made, model)
        if code == "200" and prompt is not None and call.sent_monotonic_s is not None:
            since_sent = call.sent_monotonic_s - call.arrived_monotonic_s
            worked_s = (seconds if first_s is None else first_s) - since_sent
            self.learned_of(model).note(
                body_bytes=call.asked_bytes, prompt_tokens=prompt, output_tokens=made or 0, seconds=max(0.0, worked_s)
            )
        metrics.traffic.count_request(
            model,
            failed=code.startswith("5"),
            first_token_s=first_s,
            per_token_s=call.per_token_s,
            # What the events of a stream let one think is put right by the engine's own count.
            tokens=0 if made is None else made - call.streamed_events,
        )
        if key is not None:
            metrics.key_tokens.add((prompt or 0) + (made or 0), key.name, model)
            self._quotas.leave(key, prompt or 0, made or 0)

    def _deadlines(self, headers: Mapping[str, str], *, stream: bool, usual_s: float) -> Deadlines:
        return deadlines(headers, self.settings, stream=stream, usual_s=usual_s)

    def _session(self, headers: Mapping[str, str], value: dict[str, Any]) -> bytes | None:
        return session_of(headers, value) if self.settings.routing == "session" else None


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


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) else None
