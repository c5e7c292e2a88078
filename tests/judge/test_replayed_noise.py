"""Gates on the noise of real runs: `records/bench-noise.json`, recorded by benchmarks/bench_noise.py.

Each pair draws sixteen repeats of the recording, in the order they were taken, and deals them out in turns, as
interleaved runs of one deployment would have got them: any difference is noise. A slowdown is laid on one side after.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.judge.bench_run import BenchRun, read_bench_run
from llamarack.judge.compare import CompareResult, Decision, compare
from llamarack.judge.gates import HIGHER_IS_BETTER, load_gates
from tests.judge.bench_folders import write_bench_folder

RECORDED = json.loads((Path(__file__).parent / "records" / "bench-noise.json").read_text())
SAMPLES = {
    (float(level), metric): tuple(values)
    for level, metrics in RECORDED["levels"].items()
    for metric, values in metrics.items()
}
RECORDED_REPEATS = len(next(iter(SAMPLES.values())))
PAIRS, REPEATS = 20, 8
GATES = load_gates("default")
SPEED_GATES = GATES.model_copy(update={"gates": [gate for gate in GATES.gates if gate.consistency is None]})


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> BenchRun:
    return read_bench_run(str(write_bench_folder(tmp_path_factory.mktemp("run") / "a", (1.0, 1.0, 1.0))))


def run_of(template: BenchRun, places: list[int], *, slowdown: float = 1.0) -> BenchRun:
    samples: Mapping[tuple[float, str], tuple[float | None, ...]] = {
        key: tuple(_slowed(key[1], values[place], slowdown) for place in places) for key, values in SAMPLES.items()
    }
    return replace(template, samples=samples, started_unix_s=tuple(float(place) for place in places))


def _slowed(metric: str, value: float | None, slowdown: float) -> float | None:
    if value is None or metric.endswith("_fraction"):
        return value
    return value / slowdown if metric in HIGHER_IS_BETTER else value * slowdown


def compared(template: BenchRun, seed: int, *, slowdown: float = 1.0) -> CompareResult:
    drawn = sorted(random.Random(seed).sample(range(RECORDED_REPEATS), 2 * REPEATS))
    base, new = run_of(template, drawn[::2]), run_of(template, drawn[1::2], slowdown=slowdown)
    base = replace(base, results=(replace(base.results[0], notes=("base",)),))  # two runs, not one against itself
    return compare(base, new, SPEED_GATES, gates_name="default", allow_unlike=True, finished_unix_s=0.0, seed=seed)


def test_no_no_go_in_twenty_pairs_of_the_same_deployment(template: BenchRun) -> None:
    verdicts = [compared(template, seed).verdict for seed in range(PAIRS)]
    assert Decision.NO_GO not in verdicts


def test_ten_percent_slowdown_is_found(template: BenchRun) -> None:
    verdicts = [compared(template, seed, slowdown=1.1).verdict for seed in range(PAIRS)]
    assert Decision.GO not in verdicts
    assert verdicts.count(Decision.NO_GO) >= 0.9 * PAIRS
