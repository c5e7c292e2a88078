"""What was asked for, and how one load level becomes the shares of its workers. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.measure.arrivals import Arrivals
from llamarack.measure.load import ClosedLoop, OpenLoop, Share
from llamarack.measure.point import Level
from llamarack.measure.prompts import PromptSource
from llamarack.measure.rack import RackSource
from llamarack.measure.server import Served
from llamarack.measure.slo import Slo
from llamarack.measure.target import Endpoint, Target

MIN_REQUESTS = 30  # supports a p90 (29) with one to spare
REQUESTS_PER_SLOT = 10
SLOTS_PER_WORKER = 64  # measured: see benchmarks/client_throughput.py
RATE_PER_WORKER = 200.0
WARM_UP_S = 5.0  # of an open loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for. None: chosen by the rules of this file. `rack`: behind the target, where it is one."""

    target: Target
    levels: tuple[Level, ...]
    folder: Path
    model: str | None = None
    endpoint: Endpoint = Endpoint.CHAT
    arrivals: Arrivals = Arrivals.POISSON
    requests: int | None = None
    requests_per_slot: int = REQUESTS_PER_SLOT
    duration_s: float | None = None
    repeats: int = 1
    prompts: str | None = None
    input_tokens: int = 256
    output_tokens: int = 128
    tokenizer: Path | None = None
    is_cache_wanted: bool = False
    slo: Slo | None = None
    slo_text: str | None = None
    workers: int | None = None
    timeout_s: float = 600.0
    rack: RackSource | None = None
    seed: int


def num_requests(settings: Settings, level: Level) -> int:
    if settings.requests is not None:
        return settings.requests
    return max(MIN_REQUESTS, settings.requests_per_slot * (level.concurrency or 0))


def num_workers(settings: Settings, level: Level) -> int:
    """Enough that no process is near its limit, and one processor left for the parent."""
    if settings.workers is not None:
        wanted = settings.workers
    elif level.concurrency is not None:
        wanted = math.ceil(level.concurrency / SLOTS_PER_WORKER)
    else:
        wanted = math.ceil((level.rate_per_s or 0.0) / RATE_PER_WORKER)
    most = max(1, len(os.sched_getaffinity(0)) - 1) if settings.workers is None else wanted
    return max(1, min(wanted, most, level.concurrency or wanted))


def shares_of(
    settings: Settings,
    served: Served,
    prompts: PromptSource,
    is_fixed_length: bool,
    level: Level,
    point: int,
    repeat: int,
) -> Sequence[Share]:
    """Slots and requests as even as they go."""
    workers = num_workers(settings, level)
    total = None if settings.duration_s is not None else num_requests(settings, level)
    shares = []
    for worker in range(workers):
        loop: ClosedLoop | OpenLoop
        if level.concurrency is not None:
            slots = _even(level.concurrency, workers, worker)
            loop = ClosedLoop(slots=slots, requests=None if total is None else _even(total, workers, worker))
        else:
            rate = level.rate_per_s or 0.0
            warm_up = math.ceil(WARM_UP_S * rate)
            loop = OpenLoop(rate_per_s=rate, arrivals=settings.arrivals, requests=total, warm_up_requests=warm_up)
        shares.append(
            Share(
                loop=loop,
                worker=worker,
                num_workers=workers,
                point=point,
                repeat=repeat,
                served=served,
                prompts=prompts,
                output_tokens=settings.output_tokens,
                is_fixed_length=is_fixed_length,
                is_cache_wanted=settings.is_cache_wanted,
                duration_s=settings.duration_s,
                timeout_s=settings.timeout_s,
                seed=settings.seed + repeat,
            )
        )
    return shares


def _even(total: int, parts: int, part: int) -> int:
    return total // parts + (part < total % parts)


def deadline_s(settings: Settings, level: Level) -> float:
    """No request may run longer than its timeout, so neither may the rounds of requests that a slot runs."""
    if settings.duration_s is not None:
        return settings.duration_s + 3 * settings.timeout_s + WARM_UP_S
    requests = num_requests(settings, level)
    if level.concurrency is not None:
        return (math.ceil(requests / level.concurrency) + 3) * settings.timeout_s
    return requests / (level.rate_per_s or 1.0) * 3 + WARM_UP_S * 3 + 2 * settings.timeout_s
