"""What came of the requests that a replica got, in counts that add up over gateway workers. Pure.

First-token times are counted in steps of 25 %: a median is then right to 12 %, and two replicas are told apart by more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_SHORTEST_S = 0.001
_STEP = math.log(1.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """`failures`: of `requests`, those that the engine broke off or answered with a 5xx. `first_token`: streams by step
    of their time from the admission to the first event."""

    requests: int = 0
    failures: int = 0
    first_token: Mapping[str, int] = field(default_factory=dict)

    @property
    def failure_fraction(self) -> float:
        return self.failures / self.requests if self.requests else 0.0

    @property
    def first_tokens(self) -> int:
        return sum(self.first_token.values())

    @property
    def median_first_token_s(self) -> float | None:
        left = self.first_tokens / 2
        for step, count in sorted((int(step), count) for step, count in self.first_token.items()):
            left -= count
            if left <= 0:
                return _SHORTEST_S * math.exp(_STEP * (step + 0.5))
        return None


def step_of(seconds: float) -> str:
    """The step that a time falls into; text, since it is a key of JSON."""
    return str(max(0, int(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) / _STEP)))


def total(tallies: Iterable[Tally]) -> Tally:
    requests, failures, first_token = 0, 0, dict[str, int]()
    for each in tallies:
        requests += each.requests
        failures += each.failures
        for step, count in each.first_token.items():
            first_token[step] = first_token.get(step, 0) + count
    return Tally(requests=requests, failures=failures, first_token=first_token)


def since(now: Tally, before: Tally) -> Tally:
    """What was added. A gateway worker that began anew counts from zero: then `now` itself."""
    if now.requests < before.requests or now.failures < before.failures:
        return now
    steps = {step: count - before.first_token.get(step, 0) for step, count in now.first_token.items()}
    return Tally(
        requests=now.requests - before.requests,
        failures=now.failures - before.failures,
        first_token={step: count for step, count in steps.items() if count > 0},
    )
