"""Is a new replica that gets a share of the traffic as good as those it shall replace? Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from llamarack.supervise.tally import Tally
from llamarack.units import format_duration

# Failures in excess of the others' part. One failure of few is chance; three are a pattern that nobody waits out.
_EXCESS_FRACTION = 0.02
_CLEAR_FAILURES = 3
# Tallies tell 25 % apart; the constant keeps engines of a few milliseconds from being judged by noise.
_SLOWER_FACTOR = 1.5
_SLOWER_S = 0.05
# Fewer say nothing about either.
FEWEST_REQUESTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`share`: fraction of a model's requests that its new replica gets; `for_s`: how long."""

    share: float
    for_s: float


class Judgement(StrEnum):
    WAIT = "wait"
    ON = "on"
    BACK = "back"
    TOO_FEW = "too_few"  # nothing was found wrong, but too little was seen: back as well


def judge(trial: Tally, others: Tally, *, is_over: bool) -> tuple[Judgement, str]:
    """The judgement and its reason in words. Before the time is over only clear failure ends a trial."""
    failed = (
        f"{trial.failures} of its {trial.requests} requests failed, {others.failures} of {others.requests} elsewhere"
    )
    exceeds = trial.failure_fraction > others.failure_fraction + _EXCESS_FRACTION
    if exceeds and trial.failures >= _CLEAR_FAILURES:
        return Judgement.BACK, failed
    if not is_over:
        return Judgement.WAIT, ""
    if exceeds:
        return Judgement.BACK, failed
    if trial.requests < FEWEST_REQUESTS:
        return Judgement.TOO_FEW, f"{trial.requests} requests reached it, {FEWEST_REQUESTS} are needed to judge"
    mine, theirs = trial.median_first_token_s, others.median_first_token_s
    compared = min(trial.first_tokens, others.first_tokens) >= FEWEST_REQUESTS
    if compared and mine is not None and theirs is not None:
        times = f"first token after {format_duration(mine)} (median), {format_duration(theirs)} elsewhere"
        if mine > _SLOWER_FACTOR * theirs + _SLOWER_S:
            return Judgement.BACK, times
        return Judgement.ON, f"{failed}; {times}"
    return Judgement.ON, failed
