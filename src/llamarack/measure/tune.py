"""Which batch and how many sequences give the most requests per second that keep the promise?

The search is a pure policy over what was measured so far; starting deployments is the caller's. In order:

    1. the engine's own batch tokens, at the file's sequences: the defaults to compare with
    2. batch tokens 128, 256, 512, ... at the file's sequences, until the knee, the memory ceiling or a failure
    3. sequences doubled from the file's at the best batch, until the same; halved instead where doubling never helped
    4. the best and the defaults again, in turn, since the best of many noisy tries looks better than it is
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from llamarack.config import Deployment
from llamarack.measure.distribution import Interval
from llamarack.measure.point import PointResult

MEMORY_CEILING_FRACTION = 0.85  # of the smallest card: what the next load peak may need must stay free
MIN_GAIN_FRACTION = 0.05  # a step that gains less is the knee
CONFIRMATIONS = 3  # of the best and of the defaults; the fewest that give an interval
_FIRST_BATCH_TOKENS = 128
_T_975 = {3: 4.303, 4: 3.182, 5: 2.776}  # Student's t by number of pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """None: left to the engine."""

    batch_tokens: int | None
    sequences: int | None


# The file always names the sequences, so "defaults" is the engine's own batch at the same sequences and precision.
DEFAULTS = Trial(batch_tokens=None, sequences=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`memory_fraction`: of the fullest card, None on a CPU. `goodput_per_s` None: it did not start, ran out of memory
    or was invalid, with the reason.
    """

    trial: Trial
    goodput_per_s: float | None
    memory_fraction: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Bounds of the search. `sequences`: the file's."""

    sequences: int
    max_batch_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """`gain`: best / defaults - 1 with its 95 % interval over pairs; None where it could not be measured in pairs.
    `is_better`: the whole interval is above 0; otherwise the file should stay as it is.
    """

    best: Trial
    outcomes: tuple[Outcome, ...]
    gain_fraction: float | None
    gain_interval: Interval | None
    is_better: bool


def next_trial(done: Sequence[Outcome], space: Space) -> Trial | None:
    """What to measure next; None when steps 1 to 3 are through. The same history gives the same answer."""
    if not done:
        return DEFAULTS
    batch = _next_batch(done, space)
    if batch is not None:
        return batch
    return _next_sequences(done, space)


def best(done: Sequence[Outcome]) -> Outcome | None:
    """The most goodput under the memory ceiling; of equals the earlier, which is the smaller."""
    usable = [outcome for outcome in done if _is_usable(outcome)]
    return max(usable, key=lambda outcome: outcome.goodput_per_s or 0.0, default=None)


def _next_batch(done: Sequence[Outcome], space: Space) -> Trial | None:
    climbed = [o for o in done if o.trial.batch_tokens is not None and o.trial.sequences == space.sequences]
    tried = {outcome.trial.batch_tokens for outcome in climbed}
    size = _FIRST_BATCH_TOKENS
    ladder = []
    while size <= space.max_batch_tokens:
        ladder.append(size)
        size *= 2
    reached = [outcome for size in ladder for outcome in climbed if outcome.trial.batch_tokens == size]
    if _is_over(reached) or len(tried & set(ladder)) == len(ladder):
        return None
    return Trial(batch_tokens=ladder[len(reached)], sequences=space.sequences)


def _next_sequences(done: Sequence[Outcome], space: Space) -> Trial | None:
    at_file = best([o for o in done if o.trial.sequences == space.sequences])
    if at_file is None or at_file.trial.batch_tokens is None:
        return None
    same_batch = [o for o in done if o.trial.batch_tokens == at_file.trial.batch_tokens]
    up = [at_file] + [o for o in same_batch if (o.trial.sequences or 0) > space.sequences]
    larger = (up[-1].trial.sequences or 0) * 2
    if not _is_over(up) and larger <= space.max_sequences:
        return replace(at_file.trial, sequences=larger)
    if best(up) is not at_file:
        return None
    down = [at_file] + [o for o in same_batch if (o.trial.sequences or 0) < space.sequences]
    smaller = (down[-1].trial.sequences or 0) // 2
    return None if _is_over(down) or smaller < 1 else replace(at_file.trial, sequences=smaller)


def _is_over(climb: Sequence[Outcome]) -> bool:
    """The last step failed, filled the card, or gained too little over the step before."""
    if not climb:
        return False
    if not _is_usable(climb[-1]):
        return True
    if len(climb) < 2:
        return False
    before = climb[-2].goodput_per_s or 0.0
    return (climb[-1].goodput_per_s or 0.0) <= before * (1 + MIN_GAIN_FRACTION)


def _is_usable(outcome: Outcome) -> bool:
    is_small = outcome.memory_fraction is None or outcome.memory_fraction <= MEMORY_CEILING_FRACTION
    return outcome.goodput_per_s is not None and is_small


def gain(pairs: Sequence[tuple[float, float]]) -> tuple[float, Interval] | None:
    """Of (best, defaults) measured in turn: the mean ratio - 1 and its 95 % interval, on the logarithm, where ratios
    are symmetric. None under three pairs or where one is 0.
    """
    if len(pairs) not in _T_975 or any(value <= 0 for pair in pairs for value in pair):
        return None
    logs = [math.log(better / default) for better, default in pairs]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in logs) / (len(logs) - 1))
    half = _T_975[len(pairs)] * deviation / math.sqrt(len(logs))
    return math.expm1(mean), Interval(low=math.expm1(mean - half), high=math.expm1(mean + half))


MeasureTrial = Callable[[Trial], Awaitable[Outcome]]


async def search(measure: MeasureTrial, space: Space, on_outcome: Callable[[Outcome], None]) -> TuneResult | None:
    """None where not even one setting could be measured. `measure` starts, loads and stops one deployment, and turns
    what went wrong with it into an outcome with a reason.
    """
    done: list[Outcome] = []

    async def one(trial: Trial) -> Outcome:
        outcome = await measure(trial)
        on_outcome(outcome)
        return outcome

    while (trial := next_trial(done, space)) is not None:
        done.append(await one(trial))
    chosen = best(done)
    if chosen is None:
        return None
    pairs: list[tuple[float, float]] = []
    if chosen.trial != DEFAULTS and done[0].goodput_per_s is not None:
        for _ in range(CONFIRMATIONS):
            again, default = await one(chosen.trial), await one(DEFAULTS)
            if again.goodput_per_s is not None and default.goodput_per_s is not None:
                pairs.append((again.goodput_per_s, default.goodput_per_s))
    measured = gain(pairs)
    fraction, interval = measured if measured is not None else (None, None)
    return TuneResult(
        best=chosen.trial,
        outcomes=tuple(done),
        gain_fraction=fraction,
        gain_interval=interval,
        is_better=(interval is not None and interval.low > 0) or done[0].goodput_per_s is None,
    )


def outcome_of(trial: Trial, point: PointResult, memory_fraction: float | None) -> Outcome:
    """An invalid point proves nothing, so it is no goodput."""
    goodput = point.goodput_requests_per_s if point.valid else None
    reason = None if goodput is not None else "; ".join(point.invalid_reasons) or "goodput is not known"
    return Outcome(trial=trial, goodput_per_s=goodput, memory_fraction=memory_fraction, reason=reason)


def with_trial(deployment: Deployment, trial: Trial, *, model: str) -> Deployment:
    """The same file with one model's limits set; `auto` where the engine decides."""
    models = []
    for each in deployment.models:
        if each.name == model:
            limits = [group.limits for group in each.groups]
            sets = [
                old.model_copy(
                    update={
                        "batch_tokens": trial.batch_tokens or "auto",
                        "sequences": trial.sequences or old.sequences,
                    }
                )
                for old in limits
            ]
            groups = [g.model_copy(update={"limits": new}) for g, new in zip(each.groups, sets, strict=True)]
            each = each.model_copy(update={"groups": groups})
        models.append(each)
    return deployment.model_copy(update={"models": models})
