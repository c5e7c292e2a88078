"""Gates on noise whose truth is known: a machine that drifts by a third over a run, with 3 % between neighbours.

Interleaved runs of one deployment must not get a NO-GO; a 10 % slowdown laid on one side must be found.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from llamarack.judge.bench_run import BenchRun, read_bench_run
from llamarack.judge.compare import CompareResult, Decision, compare
from llamarack.judge.gates import HIGHER_IS_BETTER, load_gates
from tests.judge.bench_folders import write_bench_folder

PAIRS, REPEATS = 40, 8
LEVELS = (1.0, 8.0)
GATES = load_gates("default")
SPEED_GATES = GATES.model_copy(update={"gates": [gate for gate in GATES.gates if gate.metric is not None]})
TYPICAL = {"first_token_p50_s": 0.2, "per_token_p50_s": 0.02, "output_tokens_per_s": 50.0, "failures_fraction": 0.0}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> BenchRun:
    run = read_bench_run(str(write_bench_folder(tmp_path_factory.mktemp("run") / "a", (1.0, 1.0, 1.0))))
    (result,) = run.results
    points = tuple(replace(result.points[0], concurrency=int(level)) for level in LEVELS)
    return replace(run, results=(replace(result, points=points),))


def pair(template: BenchRun, seed: int, *, slowdown: float = 1.0) -> CompareResult:
    random = np.random.default_rng(seed)
    mood = np.exp(np.linspace(0, math.log(4 / 3), 2 * REPEATS))
    sides = []
    for side, factor in enumerate((1.0, slowdown)):
        samples = {}
        for level in LEVELS:
            for metric, typical in TYPICAL.items():
                times = mood[side::2] * np.exp(random.normal(0, 0.03, REPEATS)) * factor
                values = typical / times if metric in HIGHER_IS_BETTER else typical * times
                samples[level, metric] = tuple(float(value) for value in values)
        starts = tuple(float(at) for at in range(side, 2 * REPEATS, 2))
        results = (replace(template.results[0], notes=(str(side),)),)  # two runs, not one against itself
        sides.append(replace(template, samples=samples, started_unix_s=starts, results=results))
    base, new = sides
    return compare(base, new, SPEED_GATES, gates_name="default", allow_unlike=True, finished_unix_s=0.0, seed=seed)


def test_same_deployment_gets_no_no_go(template: BenchRun) -> None:
    results = [pair(template, seed) for seed in range(PAIRS)]
    assert all(result.is_interleaved for result in results)
    assert Decision.NO_GO not in {result.verdict for result in results}


def test_ten_percent_slowdown_is_found_and_never_passed(template: BenchRun) -> None:
    verdicts = [pair(template, seed, slowdown=1.1).verdict for seed in range(PAIRS)]
    assert Decision.GO not in verdicts
    assert verdicts.count(Decision.NO_GO) >= 0.9 * PAIRS
