"""Bench results for tests, made by the product's own judging from hand-made records."""

from dataclasses import replace

from llamarack.measure.point import Level, point_result
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


def numbered(*per_level: list[RequestRecord]) -> list[RequestRecord]:
    return [replace(record, point=number) for number, records in enumerate(per_level) for record in records]


__all__ = ["bench_result", "numbered", "steady"]
