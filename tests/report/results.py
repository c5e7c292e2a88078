"""Bench results for tests, made by the product's own judging from hand-made records."""

from dataclasses import replace

from llamarack.measure.against_plan import Planned, PlannedRun
from llamarack.measure.point import Level, point_result
from llamarack.measure.prediction import Compared, LimitReached
from llamarack.measure.rack import MemorySeries
from llamarack.measure.record import RequestRecord
from llamarack.measure.result import BenchResult, TargetInfo, Workload, environment
from tests.measure.test_point import JUDGING, measured, steady

TARGET = TargetInfo(
    url="http://h:1", model="m<script>|", endpoint="chat", extras=(), round_trip_s=0.0002, template_tokens=3
)
WORKLOAD = Workload(
    load="closed loop",
    prompts="synthetic",
    token_counter="the server's usage",
    input_tokens=16,
    output_tokens=5,
    is_fixed_length=True,
    is_cache_wanted=False,
    repeats=1,
    workers=1,
    slo="ttft:150",
    seed=1,
)


def bench_result(*per_level: list[RequestRecord], notes: tuple[str, ...] = ()) -> BenchResult:
    points = tuple(
        point_result(Level(concurrency=2**number), [measured(*records)], JUDGING)
        for number, records in enumerate(per_level)
    )
    return BenchResult(
        target=TARGET,
        environment=environment(started_unix_s=1_790_000_000.0, started_monotonic_ns=0),
        workload=WORKLOAD,
        valid=all(point.valid for point in points),
        is_interrupted=False,
        notes=notes,
        points=points,
    )


def with_rack(result: BenchResult) -> BenchResult:
    """The same of a rack on this machine: its memory, and a plan that was 25 % too slow."""
    series = MemorySeries(
        name="card 0 (NVIDIA H200)",
        total_bytes=140 * 2**30,
        at_monotonic_ns=(0, 10**9, 2 * 10**9),
        used_bytes=(10 * 2**30, 70 * 2**30, 60 * 2**30),
    )
    per_token = Compared(name="per_token_s", predicted=0.025, measured=0.02, error_fraction=-0.2)
    limit = LimitReached(memory_bandwidth_fraction=0.36, arithmetic_fraction=0.012)
    planned = Planned(concurrency=1, compared=(per_token,), plain=(per_token,), limit=limit)
    plan = PlannedRun(
        engine="llamacpp",
        engine_version="b11434",
        device="NVIDIA H200",
        devices=2,
        replicas=1,
        sequences=8,
        memory_bandwidth_bytes_per_s=4.8e12,
        flop_per_s=989e12,
        points=(planned, *(None for _ in result.points[1:])),
        lesson=None,
    )
    return replace(result, memory=(series,), plan=plan)


def numbered(*per_level: list[RequestRecord]) -> list[RequestRecord]:
    return [replace(record, point=number) for number, records in enumerate(per_level) for record in records]


__all__ = ["bench_result", "numbered", "steady", "with_rack"]
