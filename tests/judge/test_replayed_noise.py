"""Gates on the noise of real runs: `records/bench-noise.json`, recorded by benchmarks/bench_noise.py.

It is of a busy machine: neighbours came and went, and a level took up to twice as long. A pair of runs is made of
couples of repeats that were taken one right after the other, in the order of their taking; by lot one of a couple goes
to BASE and the other to NEW, as interleaved runs of one deployment would have got them: any difference is noise. A
slowdown is laid on one side after.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
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
STARTED_S = RECORDED["started_s"]
GATES = load_gates("default")
SPEED_GATES = GATES.model_copy(update={"gates": [gate for gate in GATES.gates if gate.consistency is None]})
PAIRS = 20
FEW, MANY = 8, 150  # repeats a side
_COUPLE_S = 60.0


def couples() -> list[tuple[int, int]]:
    """Places of neighbours, none across two runs."""
    found, first = [], 0
    for repeats in RECORDED["repeats_of_each_run"]:
        found += [(first + at, first + at + 1) for at in range(0, repeats - 1, 2)]
        first += repeats
    return found


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> BenchRun:
    run = read_bench_run(str(write_bench_folder(tmp_path_factory.mktemp("run") / "a", (1.0, 1.0, 1.0))))
    (result,) = run.results
    points = tuple(replace(result.points[0], concurrency=int(level)) for level in RECORDED["levels"])
    return replace(run, results=(replace(result, points=points),))


def compared(template: BenchRun, seed: int, *, repeats: int, slowdown: float = 1.0) -> CompareResult:
    """Fewer repeats than were recorded are drawn once each; for more, couples come again."""
    drawn = random.Random(seed)
    chosen = drawn.sample(couples(), repeats) if repeats <= len(couples()) else drawn.choices(couples(), k=repeats)
    chosen.sort()
    dealt = [drawn.sample(couple, 2) for couple in chosen]
    begun = [_COUPLE_S * number - min(STARTED_S[a], STARTED_S[b]) for number, (a, b) in enumerate(dealt)]
    base = run_of(template, "base", [one for one, _ in dealt], begun)
    new = run_of(template, "new", [other for _, other in dealt], begun, slowdown=slowdown)
    return compare(base, new, SPEED_GATES, gates_name="default", allow_unlike=True, finished_unix_s=0.0, seed=seed)


def run_of(
    template: BenchRun, name: str, places: Sequence[int], begun: Sequence[float], *, slowdown: float = 1.0
) -> BenchRun:
    return replace(
        template,
        samples={key: tuple(_slowed(key[1], values[at], slowdown) for at in places) for key, values in SAMPLES.items()},
        started_unix_s=tuple(start + STARTED_S[at] for start, at in zip(begun, places, strict=True)),
        results=(replace(template.results[0], notes=(name,)),),  # two runs, not one against itself
    )


def _slowed(metric: str, value: float | None, slowdown: float) -> float | None:
    if value is None or metric.endswith("_fraction"):
        return value
    return value / slowdown if metric in HIGHER_IS_BETTER else value * slowdown


@pytest.mark.parametrize("repeats", [FEW, MANY])
def test_no_no_go_in_twenty_pairs_of_the_same_deployment(template: BenchRun, repeats: int) -> None:
    results = [compared(template, seed, repeats=repeats) for seed in range(PAIRS)]
    assert all(result.is_interleaved for result in results)
    assert Decision.NO_GO not in {result.verdict for result in results}


def test_few_repeats_do_not_pass_a_ten_percent_slowdown_and_say_what_they_could_show(template: BenchRun) -> None:
    results = [compared(template, seed, repeats=FEW, slowdown=1.1) for seed in range(PAIRS)]
    assert Decision.GO not in {result.verdict for result in results}
    detectable = [gate.detectable for result in results for gate in result.gates if gate.detectable is not None]
    assert min(detectable) > 0.1


def test_as_many_repeats_as_the_noise_asks_for_find_a_ten_percent_slowdown(template: BenchRun) -> None:
    verdicts = [compared(template, seed, repeats=MANY, slowdown=1.1).verdict for seed in range(PAIRS)]
    assert Decision.GO not in verdicts
    assert verdicts.count(Decision.NO_GO) >= 0.9 * PAIRS
