"""The plan beside the measurement: how far off it was, and how much of the hardware's limit was reached. Pure.

The errors are what calibration learns from, so they keep their sign: above 0 is slower than predicted for times.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarack.measure.counters import ServerCounters
from llamarack.measure.point import PointResult
from llamarack.plan.record import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """`error_fraction`: measured / predicted - 1. None where either side is not known."""

    name: str
    predicted: float | None
    measured: float | None
    error_fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReached:
    """Shares of what one replica's slowest card could do. `memory_bandwidth_fraction`: bytes that decoding must read,
    the weights once a step and each sequence's cache, over what the card could have read in that time.
    """

    memory_bandwidth_fraction: float | None
    arithmetic_fraction: float | None
    is_counted_by_engine: bool = False


def compare_with_plan(point: PointResult, candidate: Candidate) -> tuple[Compared, ...]:
    """Medians against the plan's speeds for a closed loop, which hold for the load that it was made for."""
    predicted = candidate.closed_loop
    pairs = (
        ("first_token_s", predicted.first_token_s, point.metrics.ttft_s.p50),
        ("per_token_s", predicted.per_token_s, point.metrics.per_token_s.p50),
        ("tokens_per_s", predicted.tokens_per_s, point.output_tokens_per_s),
    )
    return tuple(
        Compared(name=name, predicted=said, measured=seen, error_fraction=_error(said, seen))
        for name, said, seen in pairs
    )


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if not predicted or measured is None else measured / predicted - 1


def limit_reached(
    point: PointResult,
    *,
    weights_bytes: int,
    kv_bytes_per_token: float,
    flop_per_token: float,
    bandwidth_bytes_per_s: float | None,
    flop_per_s: float | None,
    replicas: int = 1,
) -> LimitReached:
    """All arguments of one card of one replica, over whose `replicas` the load is even. What the engine itself counts
    per card (vLLM with `--enable-mfu-metrics`) comes first. Else the batch is what the server reported as running;
    without that figure nothing is claimed, for the client's concurrency is not the engine's batch.
    """
    counted = _counted(point, bandwidth_bytes_per_s, flop_per_s, replicas)
    if counted is not None:
        return counted
    running = [repeat.server.running_mean for repeat in point.repeats if repeat.server is not None]
    batch = [value for value in running if value is not None]
    step_s = point.metrics.per_token_s.p50
    lengths = (point.input_tokens.mean, point.output_tokens.mean)
    if not batch or step_s is None or lengths[0] is None or lengths[1] is None:
        return LimitReached(memory_bandwidth_fraction=None, arithmetic_fraction=None)
    sequences = sum(batch) / len(batch) / replicas
    cached_tokens = sequences * (lengths[0] + lengths[1] / 2)  # half of the answer exists on average
    read_bytes = weights_bytes + cached_tokens * kv_bytes_per_token
    rate = None if point.output_tokens_per_s is None else point.output_tokens_per_s / replicas
    processed_per_s = None if rate is None else rate * (1 + lengths[0] / lengths[1])  # prompts are computed too
    return LimitReached(
        memory_bandwidth_fraction=read_bytes / step_s / bandwidth_bytes_per_s if bandwidth_bytes_per_s else None,
        arithmetic_fraction=processed_per_s * flop_per_token / flop_per_s if flop_per_s and processed_per_s else None,
    )


def _counted(
    point: PointResult, bandwidth_bytes_per_s: float | None, flop_per_s: float | None, replicas: int
) -> LimitReached | None:
    """Counters are summed over replicas. None where a repeat lacks them: a mean over some would be of other loads."""
    servers = [repeat.server for repeat in point.repeats]
    moved = [_moved_bytes_per_s(server) for server in servers]
    flop = [server.estimated_flop_per_s if server else None for server in servers]
    if not servers or None in moved or None in flop:
        return None
    mean_moved, mean_flop = (sum(v for v in values if v) / len(values) / replicas for values in (moved, flop))
    return LimitReached(
        memory_bandwidth_fraction=mean_moved / bandwidth_bytes_per_s if bandwidth_bytes_per_s else None,
        arithmetic_fraction=mean_flop / flop_per_s if flop_per_s else None,
        is_counted_by_engine=True,
    )


def _moved_bytes_per_s(server: ServerCounters | None) -> float | None:
    """Read and written, as vLLM's own notes add them up."""
    if server is None or server.estimated_read_bytes_per_s is None:
        return None
    return server.estimated_read_bytes_per_s + (server.estimated_write_bytes_per_s or 0.0)
