"""Hung or busy? Judged by what an engine generated and computed while it had work, never by its own queue. Pure.

The work is counted by the gateway; the counters come from the engine's /metrics and include one that moves with every
step, so that the long prefill of a busy engine is progress. When nothing has moved for long enough, a question decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One look at an engine. `progress`: the sum of its counters; None: it did not answer. `has_counters`: False where
    it answers and tells none, so that nothing can be judged. `in_flight`: requests that the gateway has there.
    """

    at_monotonic_s: float
    in_flight: int
    progress: int | None
    has_counters: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stillness:
    """`since_monotonic_s`: from when on nothing moved though there was work, or it was silent; None: all is well."""

    progress: int | None = None
    since_monotonic_s: float | None = None
    had_work: bool = False


def after(before: Stillness, sight: Sight) -> Stillness:
    if not sight.has_counters:
        return Stillness()
    now = sight.at_monotonic_s
    if sight.progress is not None and sight.progress != before.progress:
        return Stillness(
            progress=sight.progress,
            since_monotonic_s=now if sight.in_flight else None,
            had_work=sight.in_flight > 0,
        )
    still_since = before.since_monotonic_s if before.since_monotonic_s is not None else now
    if sight.in_flight:
        return replace(before, since_monotonic_s=still_since, had_work=True)
    if sight.progress is None:
        return replace(before, since_monotonic_s=still_since)
    # Work that left without a token is no sign of life: its clients gave up, or their time was over.
    return before if before.had_work else replace(before, since_monotonic_s=None)


def is_overdue(stillness: Stillness, now_monotonic_s: float, limit_s: float) -> bool:
    """Whether it stood still so long that it must be asked."""
    since = stillness.since_monotonic_s
    return since is not None and now_monotonic_s - since >= limit_s


def answered(stillness: Stillness, now_monotonic_s: float, in_flight: int) -> Stillness:
    """It answered when asked: its counters lie, or the moment it was looked at was a bad one."""
    return replace(stillness, since_monotonic_s=now_monotonic_s if in_flight else None, had_work=in_flight > 0)


def limit_s(stuck_request_s: float, first_token_s: float | None) -> float:
    """Half of what the gateway grants a request, so that a hung engine is ended before its requests are given up and
    they go to another; or three times the predicted wait for a first token where that is longer."""
    return max(stuck_request_s / 2, 3 * (first_token_s or 0.0))
