"""The record of a soak and its verdict. Pure: the same observations give the same record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy
import orjson
from pydantic import TypeAdapter

from llamarack.measure.soak import Asked, Soak, SoakSettings, series
from llamarack.supervise.slope import FEWEST, WINDOW, Sample, find_leak, mann_kendall
from llamarack.units import format_bytes, format_duration

SCHEMA_VERSION = 1
Verdict = Literal["GO", "NO-GO", "INCONCLUSIVE"]
_SETTLING_FRACTION = 0.1  # of the time: caches and slots fill, which is no leak
_FEWEST_REQUESTS = 30  # as `bench` asks for
_WINDOWS = 20  # of the latency drift
_DRIFT_FRACTION = 0.2
_DRIFT_SIGNIFICANT = 3.0
_STALLS_FRACTION = 0.001  # of the probes that may meet a pause of 100 ms
_MAX_ERRORS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """`leak_bytes_per_h`: of a steady rise; None: there is none, or too few samples. `points`: seconds, bytes."""

    name: str
    first_bytes: int
    last_bytes: int
    highest_bytes: int
    leak_bytes_per_h: float | None
    points: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyWindow:
    """Requests that ended in one of twenty parts of the time."""

    from_s: float
    requests: int
    first_token_p50_s: float | None
    per_token_p50_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Pauses of the server's event loop beyond 100 ms, as a request that needs no engine meets them."""

    probes: int
    lost: int
    count: int
    longest_s: float | None
    own_lag_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """`drift_fraction`: the median time per token of the last quarter against the first. `reasons`: of the verdict."""

    schema_version: int = SCHEMA_VERSION
    url: str
    model: str
    started_unix_s: float
    asked_s: float
    lasted_s: float
    concurrency: int
    requests: int
    failures: int
    errors: dict[str, int]
    output_tokens: int
    tokens_per_s: float
    latency: tuple[LatencyWindow, ...]
    drift_fraction: float | None
    memory: tuple[MemoryCurve, ...]
    slots_total: int | None
    slots_idle_min: int | None
    restarts: int | None
    out_of_memory: int
    events: dict[str, int]
    stalls: Stalls
    verdict: Verdict
    reasons: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return {"GO": 0, "NO-GO": 6, "INCONCLUSIVE": 7}[self.verdict]


def soak_result(soak: Soak, settings: SoakSettings) -> SoakResult:
    failed = [asked for asked in soak.requests if asked.error is not None]
    windows = _windows(soak)
    memory = tuple(_curve(soak, name) for name in _names(soak))
    drift, is_drift_steady = _drift(windows)
    tokens = sum(asked.tokens for asked in soak.requests)
    restarts = _restarts(soak)
    out_of_memory = sum(count for event, count in soak.events.items() if event.endswith("out_of_memory"))
    stalls = Stalls(
        probes=soak.probes,
        lost=soak.probes_lost,
        count=len(soak.stalls_s),
        longest_s=max((took for _, took in soak.stalls_s), default=None),
        own_lag_s=soak.own_lag_s,
    )
    against = _against(failed, memory, drift if is_drift_steady else None, restarts, out_of_memory, stalls)
    missing = _missing(soak, settings, memory)
    return SoakResult(
        url=settings.target.url,
        model=settings.served.model,
        started_unix_s=soak.started_unix_s,
        asked_s=settings.duration_s,
        lasted_s=soak.lasted_s,
        concurrency=settings.concurrency,
        requests=len(soak.requests),
        failures=len(failed),
        errors=dict(Counter(str(asked.error)[:200] for asked in failed).most_common(_MAX_ERRORS)),
        output_tokens=tokens,
        tokens_per_s=tokens / soak.lasted_s if soak.lasted_s else 0.0,
        latency=windows,
        drift_fraction=drift,
        memory=memory,
        slots_total=soak.looks[-1].slots_total if soak.looks else None,
        slots_idle_min=min((look.slots_idle for look in soak.looks if look.slots_idle is not None), default=None),
        restarts=restarts,
        out_of_memory=out_of_memory,
        events=dict(soak.events),
        stalls=stalls,
        verdict="NO-GO" if against else "INCONCLUSIVE" if missing else "GO",
        reasons=tuple(against or missing),
    )


def to_json(result: SoakResult) -> bytes:
    return orjson.dumps(asdict(result), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def json_schema() -> dict[str, Any]:
    """Of the record: `llamarack schema --record soak`."""
    return TypeAdapter(SoakResult).json_schema(mode="serialization")


def _against(
    failed: Sequence[Asked],
    memory: Sequence[MemoryCurve],
    drift: float | None,
    restarts: int | None,
    out_of_memory: int,
    stalls: Stalls,
) -> list[str]:
    """What speaks against it, each in one sentence."""
    found = []
    if failed:
        found.append(f"{len(failed)} requests failed, the first with `{str(failed[0].error)[:120]}`")
    if out_of_memory:
        found.append(f"out of memory {out_of_memory} times")
    if restarts:
        found.append(f"engines were started again {restarts} times")
    for curve in memory:
        if curve.leak_bytes_per_h is not None and curve.name != "host":  # others live in the host's memory as well
            found.append(f"{curve.name}: memory grows by {format_bytes(round(curve.leak_bytes_per_h))} an hour")
    if drift is not None and drift > _DRIFT_FRACTION:
        found.append(f"a token takes {100 * drift:.0f} % longer at the end than at the start")
    if stalls.count > max(1, stalls.probes * _STALLS_FRACTION):
        longest = format_duration(stalls.longest_s)
        found.append(f"{stalls.count} pauses of the server beyond 100 ms, the longest {longest}")
    return found


def _missing(soak: Soak, settings: SoakSettings, memory: Sequence[MemoryCurve]) -> list[str]:
    """Why nothing can be said."""
    found = []
    if soak.lasted_s < 0.99 * settings.duration_s:
        found.append(f"ended after {format_duration(soak.lasted_s)} of {format_duration(settings.duration_s)}")
    if len(soak.requests) < _FEWEST_REQUESTS:
        found.append(f"{len(soak.requests)} requests, {_FEWEST_REQUESTS} are needed")
    if memory and len(_settled(series(soak.looks, memory[0].name), soak)) < FEWEST:
        found.append(f"{len(soak.looks)} looks at the memory, too few for a trend: --hours more, or --sample less")
    return found


def _names(soak: Soak) -> list[str]:
    return sorted({name for look in soak.looks for name in look.memory_bytes})


def _settled(samples: Sequence[Sample], soak: Soak) -> list[Sample]:
    return [sample for sample in samples if sample.at_s >= soak.lasted_s * _SETTLING_FRACTION]


def _curve(soak: Soak, name: str) -> MemoryCurve:
    samples = series(soak.looks, name)
    leak = find_leak(_thinned(_settled(samples, soak)))
    values = [sample.memory_used_bytes for sample in samples]
    return MemoryCurve(
        name=name,
        first_bytes=values[0],
        last_bytes=values[-1],
        highest_bytes=max(values),
        leak_bytes_per_h=None if leak is None else leak.bytes_per_s * 3600,
        points=tuple((round(sample.at_s, 1), sample.memory_used_bytes) for sample in _thinned(samples)),
    )


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Evenly over the whole time: a day is judged as a day."""
    stride = max(1, -(-len(samples) // WINDOW))
    return list(samples)[::stride]


def _windows(soak: Soak) -> tuple[LatencyWindow, ...]:
    width = soak.lasted_s / _WINDOWS or 1.0
    good = [asked for asked in soak.requests if asked.error is None]
    windows = []
    for number in range(_WINDOWS):
        inside = [asked for asked in good if number * width <= asked.ended_s < (number + 1) * width]
        first = [asked.first_token_s for asked in inside if asked.first_token_s is not None]
        per_token = [
            (asked.duration_s - asked.first_token_s) / (asked.tokens - 1)
            for asked in inside
            if asked.first_token_s is not None and asked.tokens > 1
        ]
        windows.append(
            LatencyWindow(
                from_s=number * width,
                requests=len(inside),
                first_token_p50_s=float(numpy.median(first)) if first else None,
                per_token_p50_s=float(numpy.median(per_token)) if per_token else None,
            )
        )
    return tuple(windows)


def _drift(windows: Sequence[LatencyWindow]) -> tuple[float | None, bool]:
    """Last quarter against first, and whether it came steadily rather than by one bad window."""
    told = [window.per_token_p50_s for window in windows if window.per_token_p50_s is not None]
    if len(told) < 8:
        return None, False
    quarter = len(told) // 4
    first, last = (float(numpy.median(part)) for part in (told[:quarter], told[-quarter:]))
    if first <= 0:
        return None, False
    return last / first - 1, mann_kendall(numpy.array(told)) >= _DRIFT_SIGNIFICANT


def _restarts(soak: Soak) -> int | None:
    told = [look.restarts for look in soak.looks if look.restarts is not None]
    return max(told) - told[0] if told else None
