"""The short form; `benchmarks/fuzz_api.py` is the long one."""

from pathlib import Path

import pytest

from tests.gateway.fuzzing import fuzz
from tests.rigs import fake_engine, gateway_worker

pytestmark = pytest.mark.process
COUNT = 5_000
SEED = 20260830
_MIB = 1024**2


async def test_malformed_requests_make_no_fault_and_leave_nothing(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, slots=32, answer_tokens=2) as engine,
        gateway_worker(tmp_path, [engine.row()]) as gateway,
    ):
        report = await fuzz(gateway, engine, seed=SEED, count=COUNT)
    assert report.failures == []
    assert report.sent == COUNT
    assert {200, 400, 404, 405} <= set(report.statuses)  # it reached all kinds of answers
    assert max(report.open_files) - min(report.open_files) <= 2  # a connection to the engine may just be closing
    # The first fifth fills caches and arenas.
    assert report.resident_bytes[-1] - report.resident_bytes[2] < 8 * _MIB
