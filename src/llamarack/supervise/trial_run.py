"""Watches new replicas while they are on trial, until they are judged."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from llamarack.supervise.canary import Judgement, Trial, judge
from llamarack.supervise.change_failure import Failure
from llamarack.supervise.replica import Replica
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.supervise.state import State
from llamarack.supervise.tally import Tally, since, total

_JUDGE_EVERY_S = 0.5


class Rack(Protocol):
    """What a trial looks at."""

    replicas: list[Replica]

    def tallies(self) -> Mapping[str, Tally]: ...


def on_trial(old: Mapping[str, ReplicaSpec], new: Mapping[str, ReplicaSpec]) -> list[str]:
    """The first new replica of each model that loses one of its old ones."""
    leaving = {spec.model.name for id, spec in old.items() if id not in new}
    firsts: dict[str, str] = {}
    for id, spec in new.items():
        if id not in old and spec.model.name in leaving:
            firsts.setdefault(spec.model.name, id)
    return list(firsts.values())


class TrialRun:
    """One trial. `models`: of the replicas on trial, by id."""

    def __init__(self, rack: Rack, trial: Trial, models: Mapping[str, str]) -> None:
        self._rack = rack
        self._trial = trial
        self._models = models
        self._ends_unix_s: float | None = None
        self._watched: dict[str, Tally] = {}

    async def until_judged(self, pause: Callable[[float], Awaitable[None]]) -> list[str]:
        """Why each was judged good. `pause`: of so many seconds, raises when the change is given up.

        Raises Failure for the first that is worse than what it replaces, cannot be judged, or went down.
        """
        self._ends_unix_s = time.time() + self._trial.for_s
        ends_monotonic_s = time.monotonic() + self._trial.for_s
        begin = dict(self._rack.tallies())
        while True:
            now = time.monotonic()
            is_over = now >= ends_monotonic_s
            self._require_up()
            added = {id: since(tally, begin.get(id, Tally())) for id, tally in self._rack.tallies().items()}
            reasons = [self._judged(id, added, is_over=is_over) for id in self._models]
            if is_over:
                return reasons
            await pause(min(_JUDGE_EVERY_S, max(0.0, ends_monotonic_s - now)))

    def record(self) -> dict[str, Any]:
        return {
            **asdict(self._trial),
            "ends_unix_s": self._ends_unix_s,
            "tallies": {
                id: {
                    "requests": tally.requests,
                    "failures": tally.failures,
                    "median_first_token_s": tally.median_first_token_s,
                }
                for id, tally in self._watched.items()
            },
        }

    def _judged(self, id: str, added: Mapping[str, Tally], *, is_over: bool) -> str:
        """In words. Raises Failure."""
        others = self._others(id)
        self._watched = {id: added.get(id, Tally()), "others": total(added.get(other, Tally()) for other in others)}
        judgement, reason = judge(self._watched[id], self._watched["others"], is_over=is_over)
        if judgement is Judgement.BACK:
            raise Failure(f"{id} is worse than what it replaces: {reason}", exit_code=6)
        if judgement is Judgement.TOO_FEW:
            hint = "a longer --for or a larger --canary; llamarack reload alone changes without a trial"
            raise Failure(f"{id} cannot be judged: {reason}", hint=hint, exit_code=7)
        return f"{id}: {reason}"

    def _others(self, id: str) -> Sequence[str]:
        model = self._models[id]
        return [each.id for each in self._rack.replicas if each.spec.model.name == model and each.id != id]

    def _require_up(self) -> None:
        for replica in self._rack.replicas:
            if replica.id in self._models and (replica.state is not State.READY or replica.restarts):
                death = replica.last_death
                why = death.message if death else replica.state.value
                hint = death.hint if death else None
                raise Failure(f"{replica.id} went down on trial: {why}", hint=hint, exit_code=6)
