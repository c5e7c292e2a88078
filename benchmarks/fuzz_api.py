"""Sends many malformed requests to one gateway worker: no 500, no fault in its log, memory and files flat.

`python benchmarks/fuzz_api.py [--count 100000] [--seed N] [-o FILE]`, from the project's folder. The short form is
`tests/gateway/test_fuzz.py`; each request follows from the seed and its number, so a failure can be sent again alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.gateway.fuzzing import Report, fuzz
from tests.rigs import fake_engine, gateway_worker

_MIB = 1024**2


async def run(seed: int, count: int, parallel: int, most_s: float) -> tuple[Report, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            fake_engine(folder, slots=32, answer_tokens=2) as engine,
            gateway_worker(folder, [engine.row()]) as gateway,
        ):
            started = time.monotonic()
            report = await fuzz(gateway, engine, seed=seed, count=count, parallel=parallel, most_s=most_s)
            return report, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--most-s", type=float, default=math.inf, help="begin no further tenth after so long")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    report, seconds = asyncio.run(run(given.seed, given.count, given.parallel, given.most_s))
    resident_mib = [round(each / _MIB, 1) for each in report.resident_bytes]
    record = {
        "schema_version": 1,
        "seed": given.seed,
        "requests": report.sent,
        "seconds": round(seconds, 1),
        "statuses": {str(status): count for status, count in sorted(report.statuses.items())},  # 0: no answer was due
        "resident_mib_at_each_tenth": resident_mib,
        "open_files_at_each_tenth": report.open_files,
        "failures": report.failures,
        "machine": {
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
    }
    text = json.dumps(record, indent=1)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")
    raise SystemExit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
