"""Which batch, how many sequences, which context and which weights keep the promise for the most requests per second?

The search is a pure policy over what was measured so far; starting deployments is the caller's. In order:

    1. the engine's own settings, as it starts when nobody says anything: what the gain is measured against
    2. the file as it is
    3. batch tokens 128, 256, 512, ... at the file's sequences, until the knee, the memory ceiling or a failure
    4. sequences doubled from the file's, until the same; halved instead where doubling never helped
    5. other contexts, where the user allows them: a shorter one leaves memory for more sequences
    6. other weights (quantisations, another engine's format), where the user names them: 3 and 4 again for those only
       that beat the best so far as they are
    7. the best, the engine's own and the file again, in turn, since the best of many noisy tries looks better than it
       is
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llamarack.measure.distribution import Interval

MIN_GAIN_FRACTION = 0.05  # a step that gains less is no step up
MAX_FLAT_STEPS = 2  # this many in a row are the knee: one alone may be noise
CONFIRMATIONS = 3  # rounds of step 7; the fewest that give an interval
_EXTRA_ROUNDS = 2  # for rounds in which something could not be measured
FIRST_BATCH_TOKENS = 128
_T_975 = {3: 4.303, 4: 3.182, 5: 2.776}  # Student's t by number of pairs
MAX_CONFIRMATIONS = max(_T_975)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting. `batch_tokens` None: `auto`. `weights`: which of the space's, 0 is the file's. `is_own`: the
    engine's own settings; the other figures do not count then.
    """

    batch_tokens: int | None = None
    sequences: int | None = None
    context_tokens: int | None = None
    weights: int = 0
    is_own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSeen:
    """One load level of a trial. `kept_fraction`: of all requests, the failed ones too, those that kept the promise.
    Only a valid level has a goodput.
    """

    concurrency: int | None
    rate_per_s: float | None
    goodput_per_s: float | None
    kept_fraction: float | None
    first_token_p50_s: float | None
    per_token_p50_s: float | None
    output_tokens_per_s: float | None
    invalid_reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate_per_s is None else f"{self.rate_per_s:g} requests/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`goodput_per_s`: the most over the levels, `best_level` the one that had it; None: nothing valid, with the
    reason. `memory_fraction`: of the fullest card, None on a processor. `is_full`: it did not start, ran out of memory
    or holds more than the ceiling, so more of the same is not tried. `round`: of the confirmation, None before it.
    """

    trial: Trial
    goodput_per_s: float | None
    memory_fraction: float | None = None
    is_full: bool = False
    reason: str | None = None
    levels: tuple[LevelSeen, ...] = ()
    best_level: int | None = None
    took_s: float = 0.0
    round: int | None = None

    @property
    def is_usable(self) -> bool:
        return self.goodput_per_s is not None and not self.is_full


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSpace:
    """`engine`: batch tokens of one engine say nothing of another's. `batch_holds_sequences`: a step has a token of
    every sequence (vLLM), so fewer batch tokens than sequences are no setting.
    """

    engine: str
    batch_holds_sequences: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Bounds of the search. `start`: the file as it is. `batch_tokens`, `more_sequences`, `contexts`: what is tried, in
    this order. `is_batch_named`, `are_sequences_named`: those were given one by one, so each is measured and no knee
    ends them. `is_start_own`: the file has the engine's own settings already.
    """

    start: Trial
    batch_tokens: tuple[int, ...]
    more_sequences: tuple[int, ...]
    fewer_sequences: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    weights: tuple[WeightsSpace, ...]
    is_batch_named: bool = False
    are_sequences_named: bool = False
    is_start_own: bool = False

    def own(self, weights: int) -> Trial:
        return self.start if self.is_start_own and weights == 0 else Trial(is_own=True, weights=weights)

    @property
    def most_trials(self) -> int:
        """Before the confirmation."""
        sequences = len(self.more_sequences) + len(self.fewer_sequences)
        each = len(self.batch_tokens) + sequences + len(self.contexts) * (1 + len(self.more_sequences))
        return 2 - self.is_start_own + each + (len(self.weights) - 1) * (1 + each)


Explored = Generator[Trial, Outcome, None]
Climbed = Generator[Trial, Outcome, tuple[Outcome | None, bool]]
Tuned = Generator[Trial, Outcome, Outcome | None]


def explore(space: Space) -> Explored:
    """Steps 1 to 6: yields what to measure next and is sent its outcome. The same outcomes give the same trials."""
    if not space.is_start_own:
        yield space.own(0)
    found = better(None, (yield space.start))
    found = yield from _tuned(space, space.start, found)
    for index in range(1, len(space.weights)):
        base = found.trial if found is not None else space.start
        is_alike = space.weights[index].engine == space.weights[base.weights].engine
        entry = replace(base, weights=index, batch_tokens=base.batch_tokens if is_alike else None)
        seen = yield entry
        if beats(seen, found):
            found = yield from _tuned(space, entry, seen)


def _tuned(space: Space, start: Trial, found: Outcome | None) -> Tuned:
    """Steps 3 to 5 for one set of weights; `found`: the best so far."""
    holds = space.weights[start.weights].batch_holds_sequences
    batches = (
        replace(start, batch_tokens=size)
        for size in space.batch_tokens
        if not (holds and size < (start.sequences or 0))
    )
    # By its own steps: small batches below the file's would look like a knee.
    top, _ = yield from _climb(batches, None, never_flat=space.is_batch_named)
    found = better(found, top)
    at = found.trial if found is not None else start
    more, is_full = yield from _climb(
        _sequences(at, space.more_sequences, holds), found, never_flat=space.are_sequences_named
    )
    if more is found:
        found, _ = yield from _climb(_sequences(at, space.fewer_sequences, holds), found)
    else:
        found = more
    for context_tokens in space.contexts:
        at = replace(found.trial if found is not None else at, context_tokens=context_tokens)
        found = better(found, (yield at))
        is_shorter = context_tokens < (space.start.context_tokens or 0)
        if is_full and is_shorter:
            above = tuple(size for size in space.more_sequences if size > (at.sequences or 0))
            found, is_full = yield from _climb(
                _sequences(at, above, holds), found, never_flat=space.are_sequences_named
            )
    return found


def _sequences(at: Trial, sizes: Iterable[int], batch_holds_sequences: bool) -> Iterator[Trial]:
    for size in sizes:
        batch = at.batch_tokens
        if batch is not None and batch_holds_sequences:
            batch = max(batch, size)
        yield replace(at, sequences=size, batch_tokens=batch)


def _climb(trials: Iterable[Trial], found: Outcome | None, *, never_flat: bool = False) -> Climbed:
    """The best of `found` and the trials, which end at a full card, at a failure or at the knee; True: it was full."""
    flat = 0
    for trial in trials:
        seen = yield trial
        if seen.is_full:
            return found, True
        if beats(seen, found):
            found, flat = seen, 0
        elif found is not None and found.goodput_per_s:  # where nothing keeps the promise yet, nothing is flat
            flat += 1
        if flat >= MAX_FLAT_STEPS and not never_flat:
            return found, False
    return found, False


def beats(seen: Outcome, found: Outcome | None) -> bool:
    if not seen.is_usable or seen.goodput_per_s is None:
        return False
    if found is None or found.goodput_per_s is None:
        return True
    return seen.goodput_per_s > found.goodput_per_s * (1 + MIN_GAIN_FRACTION)


def better(found: Outcome | None, seen: Outcome | None) -> Outcome | None:
    return seen if seen is not None and beats(seen, found) else found


def best(done: Sequence[Outcome], space: Space) -> Outcome | None:
    """The file unless something beats it; of those that do, each must beat the one before: the smaller of equals."""
    ordered = sorted(done, key=lambda outcome: (outcome.trial != space.start, done.index(outcome)))
    found: Outcome | None = None
    for outcome in ordered:
        found = better(found, outcome)
    return found


# -- what it is worth -----------------------------------------------------------------------------------------------

Base = Literal["own", "file", "precision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The best over `base`, measured in turn: `own` is the engine's own settings on the same weights, `file` the file
    as it is, `precision` the best setting of the file's own weights. `gain_fraction`: best / base - 1 with its 95 %
    interval, on the logarithm, where ratios are symmetric; None under three rounds or where one is 0. `is_better`: the
    whole interval is above 0, or the base kept the promise for nobody in any round and the best did in all.
    """

    base: Base
    best_per_s: tuple[float, ...]
    base_per_s: tuple[float, ...]
    gain_fraction: float | None
    gain_interval: Interval | None
    is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelGain:
    """At one load level, the best over the engine's own settings; means over the rounds in which both were valid."""

    concurrency: int | None
    rate_per_s: float | None
    best_per_s: float | None
    own_per_s: float | None
    gain_fraction: float | None
    gain_interval: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`best` None: nothing could be measured. `is_better`: shown to beat the file, which is then worth rewriting.
    `is_out_of_time`: the search ended early.
    """

    best: Outcome | None
    outcomes: tuple[Outcome, ...]
    claims: tuple[Claim, ...]
    by_level: tuple[LevelGain, ...]
    is_better: bool
    is_out_of_time: bool


def gain(pairs: Sequence[tuple[float, float]]) -> tuple[float, Interval] | None:
    """Of (best, base) measured in turn."""
    if len(pairs) not in _T_975 or any(value <= 0 for pair in pairs for value in pair):
        return None
    logs = [math.log(better / base) for better, base in pairs]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in logs) / (len(logs) - 1))
    half = _T_975[len(pairs)] * deviation / math.sqrt(len(logs))
    return math.expm1(mean), Interval(low=math.expm1(mean - half), high=math.expm1(mean + half))


def claim_of(base: Base, pairs: Sequence[tuple[float, float]]) -> Claim:
    fraction, interval = gain(pairs) or (None, None)
    is_alone = len(pairs) in _T_975 and all(mine > 0 and other == 0 for mine, other in pairs)
    return Claim(
        base=base,
        best_per_s=tuple(mine for mine, _ in pairs),
        base_per_s=tuple(other for _, other in pairs),
        gain_fraction=fraction,
        gain_interval=interval,
        is_better=is_alone or (interval is not None and interval.low > 0),
    )


MeasureTrial = Callable[[Trial], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`total_s` None: as long as it takes. `now_s`: the clock."""

    total_s: float | None
    now_s: Callable[[], float]


async def search(
    measure: MeasureTrial,
    space: Space,
    on_outcome: Callable[[Outcome], None],
    *,
    confirmations: int = CONFIRMATIONS,
    budget: Budget,
) -> Found:
    """`measure` starts, loads and stops one deployment, and turns what went wrong with it into an outcome with a
    reason. With a budget the search ends while there is still time for the rounds of step 7.
    """
    started_s = budget.now_s()
    seen: dict[Trial, Outcome] = {}
    explored = explore(space)
    is_out_of_time = False
    trial = next(explored, None)
    while trial is not None:
        if trial not in seen:
            if _is_time_up(budget, started_s, seen, confirmations):
                is_out_of_time = True
                break
            seen[trial] = await measure(trial)
            on_outcome(seen[trial])
        try:
            trial = explored.send(seen[trial])
        except StopIteration:
            trial = None
    explored.close()
    done = list(seen.values())
    chosen = best(done, space)
    if chosen is None or not chosen.goodput_per_s:
        return Found(
            best=chosen, outcomes=tuple(done), claims=(), by_level=(), is_better=False, is_out_of_time=is_out_of_time
        )
    rounds = await _confirm(measure, chosen.trial, bases(chosen.trial, done, space), on_outcome, confirmations)
    claims = tuple(claim_of(base, pairs_of(rounds, chosen.trial, trial)) for base, trial in rounds.bases)
    over_file = next((claim for claim in claims if claim.base == "file"), None)
    own = next((trial for base, trial in rounds.bases if base == "own"), None)
    return Found(
        best=chosen,
        outcomes=(*done, *rounds.outcomes),
        claims=claims,
        by_level=() if own is None else _by_level(rounds, chosen.trial, own),
        is_better=chosen.trial != space.start
        and (over_file.is_better if over_file is not None else seen[space.start].is_full),
        is_out_of_time=is_out_of_time,
    )


def _is_time_up(budget: Budget, started_s: float, seen: dict[Trial, Outcome], confirmations: int) -> bool:
    if budget.total_s is None or len(seen) < 2:
        return False
    longest_s = max(outcome.took_s for outcome in seen.values())
    return budget.now_s() - started_s + longest_s * (1 + 3 * confirmations) > budget.total_s


def bases(chosen: Trial, done: Sequence[Outcome], space: Space) -> tuple[tuple[Base, Trial], ...]:
    """What the best is compared with: what is the best itself, and a file that does not run, are left out. A file that
    was only measured in a bad moment gets another one.
    """
    found: list[tuple[Base, Trial]] = [("own", space.own(chosen.weights))]
    if next((each for each in done if each.trial == space.start and not each.is_full), None):
        found.append(("file", space.start))
    if chosen.weights:
        mine = best([each for each in done if each.trial.weights == 0], space)
        if mine is not None:
            found.append(("precision", mine.trial))
    return tuple((base, trial) for base, trial in found if trial != chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    bases: tuple[tuple[Base, Trial], ...]
    outcomes: tuple[Outcome, ...]


async def _confirm(
    measure: MeasureTrial,
    chosen: Trial,
    against: tuple[tuple[Base, Trial], ...],
    on_outcome: Callable[[Outcome], None],
    confirmations: int,
) -> Rounds:
    """The best first in one round and last in the next, so that a machine that slows down favours neither. What does
    not start once is not started again.
    """
    outcomes: list[Outcome] = []
    left = list(dict.fromkeys([chosen, *(trial for _, trial in against)]))
    complete = number = 0
    while len(left) > 1 and complete < confirmations and number < confirmations + _EXTRA_ROUNDS:
        number += 1
        turn: list[Outcome] = []
        for trial in left if number % 2 else left[::-1]:
            outcome = replace(await measure(trial), round=number)
            on_outcome(outcome)
            turn.append(outcome)
        outcomes += turn
        complete += all(each.goodput_per_s is not None for each in turn)
        left = [trial for trial in left if trial == chosen or not _has_failed(trial, turn)]
    return Rounds(bases=against, outcomes=tuple(outcomes))


def _has_failed(trial: Trial, turn: Sequence[Outcome]) -> bool:
    return any(each.trial == trial and each.is_full and each.goodput_per_s is None for each in turn)


def pairs_of(rounds: Rounds, chosen: Trial, base: Trial) -> list[tuple[float, float]]:
    """Of at most as many rounds as an interval is known for."""
    pairs = []
    for number in sorted({outcome.round or 0 for outcome in rounds.outcomes}):
        rates = {each.trial: each.goodput_per_s for each in rounds.outcomes if each.round == number}
        mine, other = rates.get(chosen), rates.get(base)
        if mine is not None and other is not None:
            pairs.append((mine, other))
    return pairs[:MAX_CONFIRMATIONS]


def _by_level(rounds: Rounds, chosen: Trial, own: Trial) -> tuple[LevelGain, ...]:
    levels = next((outcome.levels for outcome in rounds.outcomes if outcome.levels), ())
    return tuple(_level_gain(rounds, chosen, own, index, level) for index, level in enumerate(levels))


def _level_gain(rounds: Rounds, chosen: Trial, own: Trial, index: int, level: LevelSeen) -> LevelGain:
    def at_level(outcome: Outcome) -> Outcome:
        rate = outcome.levels[index].goodput_per_s if index < len(outcome.levels) else None
        return replace(outcome, goodput_per_s=rate)

    only = Rounds(bases=rounds.bases, outcomes=tuple(map(at_level, rounds.outcomes)))
    pairs = pairs_of(only, chosen, own)
    fraction, interval = gain(pairs) or (None, None)
    return LevelGain(
        concurrency=level.concurrency,
        rate_per_s=level.rate_per_s,
        best_per_s=sum(mine for mine, _ in pairs) / len(pairs) if pairs else None,
        own_per_s=sum(other for _, other in pairs) / len(pairs) if pairs else None,
        gain_fraction=fraction,
        gain_interval=interval,
    )
