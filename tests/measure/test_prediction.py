"""The plan beside the measurement, on numbers that can be worked out by hand."""

from dataclasses import replace

import pytest

from llamarack.measure.counters import ServerCounters
from llamarack.measure.point import Level, PointResult, point_result
from llamarack.measure.prediction import compare_with_plan, limit_reached
from llamarack.plan.record import Candidate, Predicted
from tests.measure.test_point import JUDGING, measured, steady

CANDIDATE = Candidate(
    engine="llamacpp",
    replicas=1,
    tensor_parallel=1,
    pipeline_parallel=1,
    split_mode=None,
    tensor_split=None,
    fits=True,
    tight=False,
    reasons=(),
    cards=(),
    replica_cards=(),
    context_tokens=4096,
    sequences=1,
    batch_tokens=512,
    kv_dtype="f16",
    threads=None,
    max_sequences=None,
    max_context_tokens=None,
    predicted=Predicted(first_token_s=0.5, per_token_s=0.5, tokens_per_s=10.0),
    closed_loop=Predicted(first_token_s=0.016, per_token_s=0.025, tokens_per_s=None),
)


def _point(running: float | None) -> PointResult:
    point = point_result(Level(concurrency=1), [measured(*steady())], JUDGING)
    server = ServerCounters(
        samples=1, running_mean=running, running_max=running, waiting_mean=None, waiting_max=None, queued_max=None,
        kv_fraction_max=None, preemptions=None, output_tokens=None,
    )  # fmt: skip
    lengths = replace(point.input_tokens, mean=100.0), replace(point.output_tokens, mean=20.0)
    repeats = (replace(point.repeats[0], server=server),)
    return replace(point, repeats=repeats, input_tokens=lengths[0], output_tokens=lengths[1])


def test_errors_keep_their_sign_and_unknown_sides_have_none() -> None:
    compared = {each.name: each for each in compare_with_plan(_point(1.0), CANDIDATE)}
    assert compared["first_token_s"].error_fraction == pytest.approx(0.25)  # 20 ms measured, 16 predicted
    assert compared["per_token_s"].error_fraction == pytest.approx(-0.2)  # 20 ms measured, 25 predicted
    assert compared["tokens_per_s"].error_fraction is None
    assert compared["tokens_per_s"].measured == pytest.approx(50.0)


def test_limit_counts_weights_once_a_step_and_the_cache_of_every_running_sequence() -> None:
    reached = limit_reached(
        _point(4.0),
        weights_bytes=1_000_000,
        kv_bytes_per_token=1000.0,
        flop_per_token=2e6,
        bandwidth_bytes_per_s=2e8,
        flop_per_s=1e9,
    )
    # A step of 20 ms reads 1 MB of weights and 4 x (100 + 10) x 1 kB of cache: 1.44 MB, 72 MB/s of 200.
    assert reached.memory_bandwidth_fraction == pytest.approx(0.36)
    # 50 output tokens/s and five prompt tokens with each: 300 tokens/s x 2 MFLOP of 1 GFLOP/s.
    assert reached.arithmetic_fraction == pytest.approx(0.6)


def test_limit_is_unknown_without_the_servers_own_batch() -> None:
    reached = limit_reached(
        _point(None),
        weights_bytes=1,
        kv_bytes_per_token=1.0,
        flop_per_token=1.0,
        bandwidth_bytes_per_s=1.0,
        flop_per_s=1.0,
    )
    assert reached.memory_bandwidth_fraction is None
    assert reached.arithmetic_fraction is None


def test_engines_own_count_of_its_work_comes_first() -> None:
    point = _point(4.0)
    assert point.repeats[0].server is not None
    server = replace(
        point.repeats[0].server,
        estimated_flop_per_s=4e8,
        estimated_read_bytes_per_s=0.9e8,
        estimated_write_bytes_per_s=0.1e8,
    )
    reached = limit_reached(
        replace(point, repeats=(replace(point.repeats[0], server=server),)),
        replicas=2,
        weights_bytes=1,
        kv_bytes_per_token=1.0,
        flop_per_token=1.0,
        bandwidth_bytes_per_s=2e8,
        flop_per_s=1e9,
    )
    assert reached.is_counted_by_engine
    assert reached.memory_bandwidth_fraction == pytest.approx(0.25)
    assert reached.arithmetic_fraction == pytest.approx(0.2)
