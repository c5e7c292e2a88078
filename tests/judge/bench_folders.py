"""Bench folders as `bench -o` writes them, from given times a repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarack.measure.point import Level, point_result
from llamarack.measure.record import RequestRecord, to_json_line
from llamarack.measure.result import RECORDS_NAME, BenchResult, environment, write_result
from tests.measure.test_point import JUDGING, measured, steady
from tests.report.results import TARGET, WORKLOAD


def scaled(record: RequestRecord, factor: float) -> RequestRecord:
    """A client and server whose clock runs `factor` times as slow."""

    def later(at: Any) -> Any:
        return None if at is None else int(at * factor)

    return replace(
        record,
        scheduled_monotonic_ns=later(record.scheduled_monotonic_ns),
        sent_monotonic_ns=later(record.sent_monotonic_ns),
        first_byte_monotonic_ns=later(record.first_byte_monotonic_ns),
        first_event_monotonic_ns=later(record.first_event_monotonic_ns),
        finished_monotonic_ns=later(record.finished_monotonic_ns),
        chunks=tuple(chunk._replace(at_monotonic_ns=later(chunk.at_monotonic_ns)) for chunk in record.chunks),
    )


def write_bench_folder(
    folder: Path, factors: Sequence[float], *, started_unix_s: float = 1_790_000_000.0, **workload: Any
) -> Path:
    """One level, one repeat for each of `factors`."""
    repeats = [
        [replace(scaled(record, factor), repeat=number) for record in steady(30)]
        for number, factor in enumerate(factors)
    ]
    result = BenchResult(
        target=TARGET,
        environment=environment(
            started_unix_s=started_unix_s, started_monotonic_ns=repeats[0][0].scheduled_monotonic_ns
        ),
        workload=replace(WORKLOAD, repeats=len(factors), **workload),
        valid=True,
        is_interrupted=False,
        notes=(),
        points=(point_result(Level(concurrency=1), [measured(*records) for records in repeats], JUDGING),),
    )
    folder.mkdir(parents=True)
    write_result(result, folder)
    with (folder / RECORDS_NAME).open("wb") as file:
        file.writelines(to_json_line(record) for records in repeats for record in records)
    return folder
