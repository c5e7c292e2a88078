"""Counts of what came of the requests that this worker sent to each replica; the supervisor adds workers up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from llamarack.supervise.tally import step_of


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    failures: int = 0
    first_token: dict[str, int] = field(default_factory=dict)


class Outcomes:
    def __init__(self) -> None:
        self._by_replica: dict[str, _Counts] = {}

    def count(self, replica: str, *, failed: bool, first_token_s: float | None = None) -> None:
        """One request that ended. `first_token_s`: since its admission; None for an answer that was not streamed.
        Who left of their own accord is not counted."""
        counts = self._by_replica.get(replica)
        if counts is None:
            counts = self._by_replica[replica] = _Counts()
        counts.requests += 1
        counts.failures += failed
        if first_token_s is not None and not failed:
            step = step_of(first_token_s)
            counts.first_token[step] = counts.first_token.get(step, 0) + 1

    def report(self, replicas: Collection[str]) -> dict[str, dict[str, Any]]:
        """The fields of a Tally for each of `replicas`; what is not among them has left and is forgotten."""
        for gone in self._by_replica.keys() - set(replicas):
            del self._by_replica[gone]
        return {
            replica: {"requests": each.requests, "failures": each.failures, "first_token": dict(each.first_token)}
            for replica, each in self._by_replica.items()
        }
