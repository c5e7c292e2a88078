"""Does this point prove anything? Every rule that fails is a reason; a point with a reason is INVALID, exit code 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llamarack.measure.record import RequestRecord
from llamarack.units import format_duration

MIN_REQUESTS = 20  # below it the median's 95 % interval spans half of the sample
MAX_LAG_S, MAX_LAG_FRACTION = 0.005, 0.05  # of the median first-token time
MAX_CPU_FRACTION = 0.9
MAX_FAILURE_FRACTION = 0.01
MAX_CACHED_FRACTION = 0.01
MAX_DRIFT_FRACTION = 0.2
MIN_RATE_FRACTION = 0.95
MAX_WRONG_LENGTH_FRACTION = 0.01
MAX_COALESCED_FRACTION = 0.2
MAX_ROUND_TRIP_FRACTION = 0.25  # of the median first-token time: beyond it the way is measured, not the server
MIN_ROUNDS = 2  # a closed loop with fewer requests per slot measures its opening burst


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFacts:
    """What the rules look at. Lag and CPU: of the worst worker. `tokens_per_s_halves`: of the window's two halves.
    `delivered_fraction`: rate sent / rate of the schedule as drawn, which for a Poisson process is not the nominal one.
    """

    concurrency: int | None
    rate_per_s: float | None
    requests: int
    failures: int
    first_token_p50_s: float | None
    lag_p99_s: float | None
    cpu_fraction: float | None
    schedule_delay_p99_s: float | None
    delivered_fraction: float | None
    round_trip_s: float | None
    cached_fraction: float | None
    is_cache_wanted: bool
    wrong_length_fraction: float | None
    coalesced_fraction: float | None
    tokens_per_s_halves: tuple[float, float] | None
    is_interrupted: bool


def invalid_reasons(facts: PointFacts) -> tuple[str, ...]:
    rules = (_interrupted, _too_few, _failures, _client, _rate, _network, _coalesced, _cache, _length, _drift)
    return tuple(reason for rule in rules if (reason := rule(facts)) is not None)


def _interrupted(facts: PointFacts) -> str | None:
    return "interrupted before its end" if facts.is_interrupted else None


def _too_few(facts: PointFacts) -> str | None:
    succeeded = facts.requests - facts.failures
    if succeeded < MIN_REQUESTS:
        return f"too few: {succeeded} requests succeeded, {MIN_REQUESTS} are needed"
    if facts.concurrency is not None and facts.requests < MIN_ROUNDS * facts.concurrency:
        return f"too few: {facts.requests} requests at concurrency {facts.concurrency} are its opening burst"
    return None


def _failures(facts: PointFacts) -> str | None:
    fraction = facts.failures / facts.requests if facts.requests else 0.0
    if fraction <= MAX_FAILURE_FRACTION:
        return None
    return f"failures: {facts.failures} of {facts.requests} requests; at most {MAX_FAILURE_FRACTION:.0%} may fail"


def _client(facts: PointFacts) -> str | None:
    bound_s = _lag_bound_s(facts)
    if facts.lag_p99_s is None:
        return "client: its own lag is not known"
    if facts.lag_p99_s > bound_s:
        return f"client: its own lag p99 is {format_duration(facts.lag_p99_s)}, over {format_duration(bound_s)}"
    if facts.cpu_fraction is not None and facts.cpu_fraction > MAX_CPU_FRACTION:
        return f"client: a worker used {facts.cpu_fraction:.0%} of a processor, over {MAX_CPU_FRACTION:.0%}"
    return None


def _lag_bound_s(facts: PointFacts) -> float:
    return max(MAX_LAG_S, MAX_LAG_FRACTION * (facts.first_token_p50_s or 0.0))


def _rate(facts: PointFacts) -> str | None:
    if facts.rate_per_s is None:
        return None
    bound_s = 2 * _lag_bound_s(facts)
    if facts.schedule_delay_p99_s is not None and facts.schedule_delay_p99_s > bound_s:
        return f"rate: requests left up to {format_duration(facts.schedule_delay_p99_s)} late (p99)"
    delivered = facts.delivered_fraction
    if delivered is not None and delivered < MIN_RATE_FRACTION:
        return f"rate: {delivered:.0%} of the scheduled rate was sent, under {MIN_RATE_FRACTION:.0%}"
    return None


def _network(facts: PointFacts) -> str | None:
    if facts.round_trip_s is None or not facts.first_token_p50_s:
        return None
    fraction = facts.round_trip_s / facts.first_token_p50_s
    if fraction <= MAX_ROUND_TRIP_FRACTION:
        return None
    round_trip = format_duration(facts.round_trip_s)
    return f"network: a round trip of {round_trip} is {fraction:.0%} of the first-token p50"


def _cache(facts: PointFacts) -> str | None:
    if facts.is_cache_wanted or facts.cached_fraction is None or facts.cached_fraction <= MAX_CACHED_FRACTION:
        return None
    return f"cache: {facts.cached_fraction:.1%} of the prompt tokens beyond the template came from the server's cache"


def _length(facts: PointFacts) -> str | None:
    fraction = facts.wrong_length_fraction
    if fraction is None or fraction <= MAX_WRONG_LENGTH_FRACTION:
        return None
    return f"length: {fraction:.0%} of the answers are not of the length that was asked for"


def _coalesced(facts: PointFacts) -> str | None:
    fraction = facts.coalesced_fraction
    if fraction is None or fraction <= MAX_COALESCED_FRACTION:
        return None
    return f"network: {fraction:.0%} of the events arrived in one read with the event before; something holds them back"


def _drift(facts: PointFacts) -> str | None:
    if facts.tokens_per_s_halves is None or facts.tokens_per_s_halves[0] <= 0:
        return None
    change = facts.tokens_per_s_halves[1] / facts.tokens_per_s_halves[0] - 1
    if abs(change) <= MAX_DRIFT_FRACTION:
        return None
    return f"drift: the second half ran {change:+.0%} against the first, over {MAX_DRIFT_FRACTION:.0%}"


def coalesced_fraction(records: Sequence[RequestRecord]) -> float | None:
    """Events with the very stamp of the event before: they came in one read. None without two events."""
    gaps = [
        after.at_monotonic_ns - before.at_monotonic_ns
        for record in records
        if not record.is_failure
        for before, after in pairwise(record.chunks)
    ]
    return sum(gap == 0 for gap in gaps) / len(gaps) if gaps else None


def cached_fraction(records: Sequence[RequestRecord], *, template_tokens: int) -> float | None:
    """Of the prompt tokens beyond the template, which every request shares. None where the server does not say."""
    pairs = [
        (max(0, r.num_cached_tokens - template_tokens), max(1, r.num_prompt_tokens - template_tokens))
        for r in records
        if not r.is_failure and r.num_cached_tokens is not None and r.num_prompt_tokens is not None
    ]
    return sum(cached for cached, _ in pairs) / sum(total for _, total in pairs) if pairs else None


def wrong_length_fraction(records: Sequence[RequestRecord]) -> float | None:
    """Among answers whose length is known; only asked where the length was fixed."""
    known = [r for r in records if not r.is_failure and None not in (r.num_output_tokens, r.requested_output_tokens)]
    if not known:
        return None
    return sum(r.num_output_tokens != r.requested_output_tokens for r in known) / len(known)
