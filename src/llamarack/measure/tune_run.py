"""Starts, loads and stops one deployment per trial. How a deployment is started is the caller's: `StartRack`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from llamarack.config import Deployment
from llamarack.errors import ConfigError, DoesNotFit, EngineError, HardwareError, InvalidRun, UsageError
from llamarack.measure.point import PointResult
from llamarack.measure.rack import RackSource
from llamarack.measure.result import BenchResult
from llamarack.measure.run import Step, run_bench
from llamarack.measure.settings import Settings
from llamarack.measure.target import Target
from llamarack.measure.tune import LevelSeen, MeasureTrial, Outcome, Trial
from llamarack.measure.tune_space import Subject, deployment_of

REQUESTS_PER_SLOT = 4  # goodput needs no tail quantile, and there are many trials
_QUEUED_PER_SLOT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rack:
    """A running deployment. `memory_fraction`: of its fullest card now; None on a CPU. Asked after the load.
    `source`: for its memory and its plan; None: not looked at.
    """

    target: Target
    source: RackSource | None = None
    memory_fraction: Callable[[], Awaitable[float | None]]


# The folder is for its logs.
StartRack = Callable[[Deployment, Path], AbstractAsyncContextManager[Rack]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Whoever is told what happens on the way."""

    on_step: Callable[[Trial, Step], None] = lambda _trial, _step: None
    on_retry: Callable[[Trial, str], None] = lambda _trial, _reason: None
    on_result: Callable[[BenchResult, Path], object] = lambda _result, _folder: None


def measuring(subject: Subject, start: StartRack, settings: Settings, listening: Listening) -> MeasureTrial:
    """`settings.target` and `settings.folder` are set per trial: `trial-N` under the folder given. A trial none of
    whose levels is valid is loaded a second time as it runs, since a busy moment of the machine proves nothing.
    """
    count = 0

    async def measure(trial: Trial) -> Outcome:
        nonlocal count
        count += 1
        folder = settings.folder / f"trial-{count}"
        folder.mkdir(parents=True)
        started_s = time.monotonic()
        deployment = admitting(deployment_of(subject, trial), settings)
        try:
            async with start(deployment, folder / "rack") as rack:
                own = replace(settings, target=rack.target, rack=rack.source, folder=folder, model=subject.model)
                result = await _bench(own, trial, listening)
                if not any(point.valid for point in result.points):
                    listening.on_retry(trial, outcome_of(trial, result.points, None, None).reason or "")
                    again = folder / "again"
                    again.mkdir()
                    result = await _bench(replace(own, folder=again), trial, listening)
                memory_fraction = await rack.memory_fraction()
        except (EngineError, DoesNotFit, HardwareError, UsageError, InvalidRun) as error:
            # What the user asked for is wrong; but where the file's own weights took it, others have no tokens for it.
            if isinstance(error, UsageError) and not isinstance(error, ConfigError) and trial.weights == 0:
                raise
            reason = error.message.splitlines()[0]
            took_s = time.monotonic() - started_s
            return Outcome(trial=trial, goodput_per_s=None, is_full=True, reason=reason, took_s=took_s)
        ceiling = subject.weights[trial.weights].memory_ceiling_fraction
        outcome = outcome_of(trial, result.points, memory_fraction, ceiling)
        return replace(outcome, took_s=time.monotonic() - started_s)

    return measure


async def _bench(settings: Settings, trial: Trial, listening: Listening) -> BenchResult:
    result = await run_bench(settings, lambda step: listening.on_step(trial, step))
    listening.on_result(result, settings.folder)
    if result.is_interrupted:
        raise asyncio.CancelledError
    return result


def admitting(deployment: Deployment, settings: Settings) -> Deployment:
    """The door turns nobody away while settings are compared: what waits too long breaks its promise all the same."""
    most = max(level.concurrency or 0 for level in settings.levels)
    queued = max(deployment.gateway.max_queue_requests, _QUEUED_PER_SLOT * most)
    patient = replace(
        deployment.gateway,
        max_queue_requests=queued,
        max_queue_tokens=None,
        max_queue_s=max(deployment.gateway.max_queue_s, settings.timeout_s),
    )
    return replace(deployment, gateway=patient)


def outcome_of(
    trial: Trial, points: Sequence[PointResult], memory_fraction: float | None, ceiling_fraction: float | None
) -> Outcome:
    """The level with the most goodput speaks for the trial. An invalid level proves nothing."""
    levels = tuple(map(_level_seen, points))
    valid = [index for index, level in enumerate(levels) if level.goodput_per_s is not None]
    best = max(valid, key=lambda index: levels[index].goodput_per_s or 0.0, default=None)
    reason = None
    if best is None:
        # One each: a run with many faults is not explained better by all of them.
        reasons = [f"{level}: {level.invalid_reasons[0]}" for level in levels if level.invalid_reasons]
        reason = "; ".join(reasons) or "goodput is not known"
    is_full = ceiling_fraction is not None and memory_fraction is not None and memory_fraction > ceiling_fraction
    if is_full and reason is None:
        reason = f"over {ceiling_fraction:.0%} of the fullest card"
    return Outcome(
        trial=trial,
        goodput_per_s=None if best is None else levels[best].goodput_per_s,
        memory_fraction=memory_fraction,
        is_full=is_full,
        reason=reason,
        levels=levels,
        best_level=best,
    )


def _level_seen(point: PointResult) -> LevelSeen:
    is_open = point.rate_per_s is not None
    metrics = point.metrics
    first = metrics.ttft_from_scheduled_s if is_open else metrics.ttft_s
    return LevelSeen(
        concurrency=point.concurrency,
        rate_per_s=point.rate_per_s,
        goodput_per_s=point.goodput_requests_per_s if point.valid else None,
        kept_fraction=None if point.goodput is None else point.goodput.attainment_fraction,
        first_token_p50_s=first.p50,
        per_token_p50_s=metrics.per_token_s.p50,
        output_tokens_per_s=point.output_tokens_per_s,
        invalid_reasons=point.invalid_reasons,
    )


def tuned_path(file: Path) -> Path:
    """Beside the file or the model; the file itself is never overwritten."""
    suffix = file.suffix if file.suffix in {".yaml", ".yml"} else ".yaml"
    return file.with_name(f"{file.stem}.tuned{suffix}")
