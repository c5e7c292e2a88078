"""Starts, loads and stops one deployment per trial. How a deployment is started is the caller's: `StartRack`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from llamarack.config import Deployment
from llamarack.errors import DoesNotFit, EngineError, InvalidRun, UsageError
from llamarack.measure.rack import RackSource
from llamarack.measure.result import BenchResult
from llamarack.measure.run import Step, run_bench
from llamarack.measure.settings import Settings
from llamarack.measure.target import Target
from llamarack.measure.tune import MeasureTrial, Outcome, Space, Trial, outcome_of, with_trial

# This project's own bound on the length of the search; a batch cannot be longer than the context in any case.
MAX_BATCH_TOKENS = 16384
MAX_SEQUENCES_FACTOR = 8  # of the file's


@dataclass(frozen=True, slots=True, kw_only=True)
class Rack:
    """A running deployment. `memory_fraction`: of its fullest card now; None on a CPU. Asked after the load.
    `source`: for its memory and its plan; None: not looked at.
    """

    target: Target
    source: RackSource | None = None
    memory_fraction: Callable[[], Awaitable[float | None]]


StartRack = Callable[[Deployment], AbstractAsyncContextManager[Rack]]


def space_of(deployment: Deployment, model: str) -> Space:
    """Of the model's first group, whose limits the trials set in all its groups."""
    limits = next(each for each in deployment.models if each.name == model).groups[0].limits
    return Space(
        sequences=limits.sequences,
        max_batch_tokens=min(MAX_BATCH_TOKENS, limits.context_tokens),
        max_sequences=limits.sequences * MAX_SEQUENCES_FACTOR,
    )


def only_model(deployment: Deployment, model: str | None) -> str:
    """Raises UsageError where it must be named."""
    names = [each.name for each in deployment.models]
    if model is None and len(names) == 1:
        return names[0]
    if model not in names:
        asked = "one must be chosen" if model is None else f"`{model}` is not among them"
        raise UsageError(f"the file has the models {', '.join(names)}; {asked}", hint=f"--model {names[0]}")
    return model


def measuring(
    deployment: Deployment, model: str, start: StartRack, settings: Settings, on_step: Callable[[Trial, Step], None]
) -> MeasureTrial:
    """`settings.target` and `settings.folder` are set per trial: `trial-N` under the folder given."""
    count = 0

    async def measure(trial: Trial) -> Outcome:
        nonlocal count
        count += 1
        folder = settings.folder / f"trial-{count}"
        folder.mkdir(parents=True)
        try:
            async with start(with_trial(deployment, trial, model=model)) as rack:
                own = replace(settings, target=rack.target, rack=rack.source, folder=folder, model=model)
                result = await _bench(own, trial, on_step)
                memory_fraction = await rack.memory_fraction()
        except (EngineError, DoesNotFit, InvalidRun) as error:
            return Outcome(trial=trial, goodput_per_s=None, memory_fraction=None, reason=error.message)
        return outcome_of(trial, result.points[0], memory_fraction)

    return measure


async def _bench(settings: Settings, trial: Trial, on_step: Callable[[Trial, Step], None]) -> BenchResult:
    result = await run_bench(settings, lambda step: on_step(trial, step))
    if result.is_interrupted:
        raise KeyboardInterrupt
    return result


def tuned_path(file: Path) -> Path:
    """Beside the file; the file itself is never overwritten."""
    return file.with_name(f"{file.stem}.tuned{file.suffix}")
