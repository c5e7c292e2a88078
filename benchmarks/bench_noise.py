"""The noise of real benchmark runs, repeat by repeat, for the replays in tests/judge/test_replayed_noise.py.

    llamarack serve rack.yaml --detach
    llamarack bench http://127.0.0.1:8080 --concurrency 1,4 --requests 8 --repeat 30 --input-tokens 64 \
        --output-tokens 16 -o run
    python -m benchmarks.bench_noise run -o tests/judge/records/bench-noise.json

One file of some kilobytes: for each level and metric the value of each repeat, in the order they were taken.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from llamarack.hardware.host import read_host
from llamarack.judge.bench_run import read_bench_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of bench -o")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    run = read_bench_run(str(arguments.run), accept_invalid=True)
    result = run.results[0]
    host = read_host(Path("/"))
    levels: dict[str, dict[str, list[float | None]]] = {}
    for (level, metric), values in run.samples.items():
        levels.setdefault(f"{level:g}", {})[metric] = [None if v is None else float(f"{v:.6g}") for v in values]
    record = {
        "machine": f"{host.processor}, {host.cores_usable} cores",
        "llamarack": result.environment.llamarack_version,
        "model": result.target.model,
        "requests_per_repeat": result.points[0].requests // result.workload.repeats,
        "levels": levels,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
