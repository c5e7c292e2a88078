"""Did a request keep the promise, and how many per second did? `ttft:500,tpot:50,e2el:9000`, in milliseconds.

The names are those of `vllm bench serve --goodput`. A failed request never keeps it, and one whose time is not known
makes goodput unknown: it is left out by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarack.errors import UsageError
from llamarack.measure.distribution import Interval, mean_interval
from llamarack.measure.metrics import request_times
from llamarack.measure.record import RequestRecord

_NAMES = {"ttft": "first_token_s", "tpot": "per_token_s", "e2el": "end_to_end_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Upper bounds in seconds; None: no promise."""

    first_token_s: float | None = None
    per_token_s: float | None = None
    end_to_end_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """`attainment_fraction` has all measured requests in its denominator, the failed ones too."""

    requests_per_s: float
    requests_per_s_interval: Interval | None
    attainment_fraction: float
    attempts: int


def parse_slo(text: str) -> Slo:
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, separator, value = part.strip().partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = 0
        if not separator or name not in _NAMES or not milliseconds > 0:
            raise UsageError(
                f"`--slo` `{part.strip()}` is not one of ttft, tpot, e2el with milliseconds above 0",
                hint="--slo ttft:500,tpot:50",
            )
        bounds[_NAMES[name]] = milliseconds / 1000
    return Slo(**bounds)


def keeps(record: RequestRecord, slo: Slo, *, from_scheduled: bool) -> bool | None:
    """None: a bound is set and its time is not known. One token has no per-token time and keeps that bound."""
    if record.is_failure:
        return False
    times = request_times(record)
    first = times.first_token_from_scheduled_s if from_scheduled else times.first_token_s
    end = times.end_to_end_from_scheduled_s if from_scheduled else times.end_to_end_s
    verdicts = [_within(first, slo.first_token_s), _within(end, slo.end_to_end_s)]
    if len(record.chunks) > 1:
        verdicts.append(_within(times.per_token_s, slo.per_token_s))
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _within(value: float | None, bound: float | None) -> bool | None:
    if bound is None:
        return True
    return None if value is None else value <= bound


def goodput(
    records: Sequence[RequestRecord], slo: Slo, *, duration_s: float, from_scheduled: bool, seed: int = 0
) -> Goodput | None:
    """None without requests, or where one request's verdict is not known."""
    ordered = sorted(records, key=lambda record: record.scheduled_monotonic_ns)
    verdicts = [keeps(record, slo, from_scheduled=from_scheduled) for record in ordered]
    if not verdicts or None in verdicts or duration_s <= 0:
        return None
    kept = [1.0 if verdict else 0.0 for verdict in verdicts]
    attempts_per_s = len(kept) / duration_s
    interval = mean_interval(kept, seed=seed)
    return Goodput(
        requests_per_s=sum(kept) / duration_s,
        requests_per_s_interval=interval
        and Interval(low=interval.low * attempts_per_s, high=interval.high * attempts_per_s),
        attainment_fraction=sum(kept) / len(kept),
        attempts=len(kept),
    )
