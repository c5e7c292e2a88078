"""The processor's speed model: against what was measured, its limits, and its place in a plan."""

from dataclasses import replace
from itertools import pairwise

import pytest

from llamarack.config import Group, Limits
from llamarack.hardware.machine import Machine
from llamarack.plan.calibration import Calibration
from llamarack.plan.cpu_speed import predict_cpu
from llamarack.plan.planner import plan_group
from llamarack.plan.record import Load, Predicted
from llamarack.plan.reference import gguf_spec
from llamarack.plan.shape import shape_of
from tests.plan.shapes import LLAMA2_7B, SMOLLM2, host

LOAD = Load(context_tokens=1024, concurrency=1, input_tokens=128, output_tokens=64)


def _speed(
    model=SMOLLM2, method="Q4_1", streams=1.0, threads=2, bandwidth: float | None = 28e9, load=LOAD
) -> Predicted:
    shape = shape_of(gguf_spec(model, method))
    return predict_cpu(shape, load, streams, threads=threads, bandwidth_bytes_per_s=bandwidth, kv_element_bytes=2.0)


def test_smollm2_on_two_cores_is_as_fast_as_it_was_measured() -> None:
    """In sample: 64 tokens in, 32 out, an AMD EPYC, xllamacpp 2026.10.11549 (benchmarks/results/cpu_engines.json)."""
    found = _speed(load=replace(LOAD, input_tokens=64, output_tokens=32))
    assert found.per_token_s == pytest.approx(0.0114, rel=0.1)
    assert found.first_token_s == pytest.approx(0.327, rel=0.1)


def test_copies_of_one_thread_are_ahead_as_soon_as_there_is_work_for_both() -> None:
    """As measured: 1.65 times slower with one stream, as fast with 4 and ahead with 8."""
    spec = gguf_spec(SMOLLM2, "Q4_1")
    machine = Machine(host=replace(host(cores=2), memory_bandwidth_bytes_per_s=28e9))
    ahead = []
    for streams in (1, 4, 8):
        load = Load(context_tokens=1024, concurrency=streams, input_tokens=64, output_tokens=32)
        one, two = (
            plan_group(spec, Group(gpus=[], replicas=n), machine, model_name="m", load=load).predicted.tokens_per_s
            for n in (1, 2)
        )
        assert one is not None
        assert two is not None
        ahead.append(two / one)
    assert ahead[0] == pytest.approx(1 / 1.65, rel=0.05)
    assert min(ahead[1:]) > 1.0


def test_two_threads_are_less_than_twice_as_fast_as_one_that_waits_for_none() -> None:
    one, two = (_speed(threads=n, bandwidth=1e12).per_token_s or 0 for n in (1, 2))
    assert two < one < 1.95 * two


def test_memory_is_the_limit_where_it_is_slow() -> None:
    shape = shape_of(gguf_spec(LLAMA2_7B, "Q8_0"))
    slow = _speed(LLAMA2_7B, "Q8_0", threads=64, bandwidth=10e9)
    assert slow.per_token_s == pytest.approx(shape.decode_bytes / 10e9, rel=0.03)
    fast = _speed(LLAMA2_7B, "Q8_0", threads=64, bandwidth=20e9)
    assert (slow.per_token_s or 0) / (fast.per_token_s or 1) == pytest.approx(2.0, rel=0.03)
    assert _speed(bandwidth=None) == Predicted(first_token_s=None, per_token_s=None, tokens_per_s=None)


def test_more_streams_wait_longer_and_give_more_together() -> None:
    found = [_speed(streams=n) for n in (1.0, 2.0, 4.0, 8.0)]
    for few, many in pairwise(found):
        assert (many.per_token_s or 0) > (few.per_token_s or 0)
        assert (many.first_token_s or 0) >= (few.first_token_s or 0)
        assert (many.tokens_per_s or 0) > (few.tokens_per_s or 0)


def test_plan_on_the_processor_has_a_speed_once_its_memory_was_measured() -> None:
    spec, group = gguf_spec(SMOLLM2, "Q4_1"), Group(gpus=[], limits=Limits(context_tokens=1024, sequences=4))
    unknown = Machine(host=host(cores=2))
    known = replace(unknown, host=replace(unknown.host, memory_bandwidth_bytes_per_s=28e9, processor="Example"))
    assert plan_group(spec, group, unknown, model_name="m", load=LOAD).predicted.per_token_s is None
    assert plan_group(spec, group, known, model_name="m", load=LOAD).predicted == _speed()
    lesson = Calibration(card="Example", engine="llamacpp", engine_version="1", per_token_factor=2.0)
    learnt = plan_group(spec, group, known, model_name="m", load=LOAD, calibrations=[lesson]).predicted
    assert learnt.per_token_s == pytest.approx(2 * (_speed().per_token_s or 0))


def test_replicas_share_cores_and_memory() -> None:
    spec = gguf_spec(SMOLLM2, "Q4_1")
    machine = Machine(host=replace(host(cores=4), memory_bandwidth_bytes_per_s=40e9))
    load = replace(LOAD, concurrency=2)
    two = plan_group(spec, Group(gpus=[], replicas=2), machine, model_name="m", load=load).predicted
    each = _speed(threads=2, bandwidth=20e9)
    assert two.per_token_s == each.per_token_s
    assert two.tokens_per_s == pytest.approx(2 * (each.tokens_per_s or 0))
