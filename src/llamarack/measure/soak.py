"""A steady load for hours, and what it did to the server: memory, slots, errors, pauses, drift; then a verdict.

Requests go in a closed loop. Beside them one short request to /live runs ten times a second: it needs no engine, so
what it waits for is the gateway's event loop. Where the target is a rack of this machine its status is sampled too.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarack.measure.client import Client, Job
from llamarack.measure.prompts import PromptSource, prompt
from llamarack.measure.record import ErrorKind, Phase, RequestRecord
from llamarack.measure.server import Served, request_body
from llamarack.measure.target import Target
from llamarack.supervise.slope import Sample

STALL_S = 0.1
_PROBE_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_TICK_S = 0.02
_FAILED_PAUSE_S = 0.5  # a server that is down is not asked ten thousand times a second

ReadStatus = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    target: Target
    served: Served
    prompts: PromptSource
    duration_s: float
    concurrency: int
    output_tokens: int
    sample_s: float
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, short enough to keep for a day. `first_token_s` None: it failed before."""

    ended_s: float  # since the start
    first_token_s: float | None
    duration_s: float
    tokens: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One sample of the rack. Memory by name: `replica llama-0`, `card 0`, `host`."""

    at_s: float
    memory_bytes: dict[str, int]
    slots_idle: int | None
    slots_total: int | None
    restarts: int | None


@dataclass(slots=True)
class Soak:
    """What was seen; grows while it runs. `stalls_s`: pauses of the server's event loop beyond 100 ms."""

    started_unix_s: float
    requests: list[Asked] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    stalls_s: list[tuple[float, float]] = field(default_factory=list)
    probes: int = 0
    probes_lost: int = 0
    own_lag_s: float = 0.0  # the worst of this process: its stalls are not the server's
    events: Counter[str] = field(default_factory=Counter)
    event_times_s: set[tuple[float, str]] = field(default_factory=set)
    lasted_s: float = 0.0
    is_interrupted: bool = False


async def run_soak(
    settings: SoakSettings, *, read_status: ReadStatus | None, on_progress: Callable[[Soak], None]
) -> Soak:
    """Runs to its end, or until its task is cancelled, and returns what was seen until then."""
    soak = Soak(started_unix_s=time.time())
    started = time.monotonic()
    client = Client(settings.target)
    lateness = _Lateness()
    tasks = [asyncio.create_task(_ask(settings, client, soak, started, slot)) for slot in range(settings.concurrency)]
    tasks += [
        asyncio.create_task(lateness.run()),
        asyncio.create_task(_probe(Client(settings.target), soak, started, lateness)),
        asyncio.create_task(_sample(settings, soak, started, read_status, on_progress)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, timeout=settings.duration_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    except asyncio.CancelledError:
        soak.is_interrupted = True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.close()
        soak.lasted_s = time.monotonic() - started
    return soak


class _Lateness:
    """How late this process is itself, of the last seconds."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=round(_PROBE_TIMEOUT_S / _TICK_S) + 100)

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self._late.append((now, max(0.0, now - before - _TICK_S)))

    def since(self, monotonic_s: float) -> float:
        return max((late for at, late in self._late if at >= monotonic_s), default=0.0)


async def _ask(settings: SoakSettings, client: Client, soak: Soak, started: float, slot: int) -> None:
    """One of the steady users."""
    number = slot
    while True:
        question = prompt(settings.prompts, point=0, repeat=0, index=number)
        body = request_body(
            settings.served,
            question.text,
            output_tokens=settings.output_tokens,
            is_fixed_length=False,
            is_cache_wanted=False,
        )
        job = Job(
            index=number,
            path=settings.served.endpoint.path,
            body=body,
            phase=Phase.MEASURED,
            prompt_id=question.id,
            scheduled_monotonic_ns=time.monotonic_ns(),
        )
        record = await client.stream(job, timeout_s=settings.timeout_s)
        if not record.is_cancelled:
            soak.requests.append(_short(record, started))
        if record.error_kind is not None:
            await asyncio.sleep(_FAILED_PAUSE_S)
        number += settings.concurrency


def _short(record: RequestRecord, started: float) -> Asked:
    sent = record.sent_monotonic_ns or record.scheduled_monotonic_ns
    first = record.chunks[0].at_monotonic_ns if record.chunks else None
    return Asked(
        ended_s=record.finished_monotonic_ns * 1e-9 - started,
        first_token_s=None if first is None else (first - sent) * 1e-9,
        duration_s=(record.finished_monotonic_ns - sent) * 1e-9,
        tokens=record.num_output_tokens or len(record.chunks),
        # A model that answers with its end token at once has said nothing wrong.
        error=None if record.error_kind in {None, ErrorKind.EMPTY} else f"{record.error_kind}: {record.error_detail}",
    )


async def _probe(client: Client, soak: Soak, started: float, lateness: _Lateness) -> None:
    try:
        while True:
            before = time.monotonic()
            try:
                answer = await client.call("GET", "/live", timeout_s=_PROBE_TIMEOUT_S)
                took_s = answer.elapsed_s
            except (OSError, TimeoutError):
                soak.probes_lost += 1
                took_s = time.monotonic() - before
            soak.probes += 1
            own_s = lateness.since(before)
            soak.own_lag_s = max(soak.own_lag_s, own_s)
            if took_s - own_s > STALL_S:
                soak.stalls_s.append((time.monotonic() - started, took_s))
            await asyncio.sleep(_PROBE_S)
    finally:
        client.close()


async def _sample(
    settings: SoakSettings,
    soak: Soak,
    started: float,
    read_status: ReadStatus | None,
    on_progress: Callable[[Soak], None],
) -> None:
    while True:
        if read_status is not None:
            try:
                _take(soak, await read_status(), time.monotonic() - started)
            except Exception as error:  # a rack that is down shows in the requests, and must not end the soak
                soak.events[f"status_unread {type(error).__name__}"] += 1
        soak.lasted_s = time.monotonic() - started
        on_progress(soak)
        await asyncio.sleep(settings.sample_s)


def _take(soak: Soak, status: dict[str, Any], at_s: float) -> None:
    replicas = [replica for model in status["models"] for replica in model["replicas"]]
    memory = {
        f"replica {replica['id']}": replica["actual"]["private_bytes"]
        for replica in replicas
        if replica["actual"].get("private_bytes") is not None
    }
    memory |= {f"card {card['index']}": card["memory_used_bytes"] for card in status.get("cards", [])}
    if used := status.get("host", {}).get("memory_used_bytes"):
        memory["host"] = used
    soak.looks.append(
        Look(
            at_s=at_s,
            memory_bytes=memory,
            slots_idle=sum(replica["slots_idle"] for replica in replicas),
            slots_total=sum(replica["slots_total"] for replica in replicas),
            restarts=sum(replica["restarts"] for replica in replicas),
        )
    )
    for event in status["events"]:
        key = (event["time_unix_s"], event["kind"])
        if event["time_unix_s"] >= soak.started_unix_s and key not in soak.event_times_s:
            soak.event_times_s.add(key)
            cause = event["data"].get("cause")
            soak.events[event["kind"] if cause is None else f"{event['kind']} {cause}"] += 1


def series(looks: Sequence[Look], name: str) -> list[Sample]:
    """One memory curve."""
    return [
        Sample(at_s=look.at_s, memory_used_bytes=look.memory_bytes[name]) for look in looks if name in look.memory_bytes
    ]
