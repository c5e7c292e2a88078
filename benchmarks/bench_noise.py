"""The noise of real benchmark runs, repeat by repeat, for the replays in tests/judge/test_replayed_noise.py.

    llamarack bench rack.yaml --concurrency 1,4 --requests 8 --repeat 30 --input-tokens 64 --output-tokens 16 -o run
    mkdir -p tests/judge/records && python -m benchmarks.bench_noise run -o tests/judge/records/bench-noise.json

Several runs of one deployment, of different hours, are recorded one behind the other; folders of single repeats that
were taken in turns are joined by commas, as for `compare`, and are one run. Of a run that was interrupted the repeats
that every level finished count. One file of some kilobytes: when each repeat began, and for each level and metric its
value.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamarack.hardware.host import read_host
from llamarack.judge.bench_run import BenchRun, read_bench_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of bench -o, oldest first")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    read_bench_run(",".join(arguments.runs), accept_invalid=True)  # refuses runs of different loads
    runs = [read_bench_run(run, accept_invalid=True) for run in arguments.runs]
    arguments.output.write_text(json.dumps(_record(runs), separators=(",", ":")) + "\n")


def _record(runs: Sequence[BenchRun]) -> dict[str, Any]:
    result = runs[0].results[0]
    host = read_host(Path("/"))
    whole = [_whole_repeats(run) for run in runs]
    begun = runs[0].started_unix_s[0]
    levels: dict[str, dict[str, list[float | None]]] = {}
    for run, repeats in zip(runs, whole, strict=True):
        for (level, metric), values in run.samples.items():
            kept = [None if v is None else float(f"{v:.6g}") for v in values[:repeats]]
            levels.setdefault(f"{level:g}", {}).setdefault(metric, []).extend(kept)
    return {
        "machine": f"{host.processor}, {host.cores_usable} cores",
        "llamarack": result.environment.llamarack_version,
        "model": result.target.model,
        "requests_per_repeat": result.points[0].requests // len(result.points[0].repeats),
        "repeats_of_each_run": whole,
        "started_s": [
            round(at - begun, 1)
            for run, repeats in zip(runs, whole, strict=True)
            for at in run.started_unix_s[:repeats]
        ],
        "levels": levels,
    }


def _whole_repeats(run: BenchRun) -> int:
    """The last one of an interrupted run may lack requests."""
    return min(len(values) for values in run.samples.values()) - run.results[-1].is_interrupted


if __name__ == "__main__":
    main()
