"""One copy of a model on all cores against several that share them, weighed by the load."""

from llamarack.hardware.machine import Host, Machine
from llamarack.plan.placement import ways
from llamarack.plan.planner import plan_model
from llamarack.plan.ranking import Goal
from llamarack.plan.record import Load
from llamarack.plan.reference import gguf_spec
from llamarack.units import GIB
from tests.plan.shapes import SMOLLM2


def _machine(cores: int, bandwidth_bytes_per_s: float | None) -> Machine:
    host = Host(
        processor="a processor",
        cores_usable=cores,
        instruction_sets=("avx2",),
        memory_total_bytes=20 * GIB,
        memory_available_bytes=20 * GIB,
        memory_bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )
    return Machine(host=host)


def _plan(concurrency: int, *, bandwidth: float | None = 20e9, goal: Goal = "throughput", cores: int = 2):
    load = Load(context_tokens=512, concurrency=concurrency, input_tokens=64, output_tokens=32)
    return plan_model(
        gguf_spec(SMOLLM2, "Q4_1"), _machine(cores, bandwidth), load, model_name="m", engines=("llamacpp",), goal=goal
    )


def test_copies_share_the_cores_evenly_and_never_outnumber_the_streams():
    counts = {
        cores: [len(way.replicas) for way in ways("llamacpp", _machine(cores, None), 99)] for cores in (1, 2, 6, 8)
    }
    assert counts == {1: [1], 2: [1, 2], 6: [1, 2], 8: [1, 2, 4, 8]}
    assert [len(way.replicas) for way in ways("llamacpp", _machine(8, None), 1)] == [1]
    assert [len(way.replicas) for way in ways("vllm", _machine(8, None), 99)] == [1]


def test_each_copy_gets_its_share_of_threads_and_sequences():
    two = next(candidate for candidate in _plan(8).candidates if candidate.replicas == 2)
    assert (two.threads, two.sequences, two.replica_cards) == (1, 4, ((), ()))


def test_one_stream_gets_all_cores_and_more_are_ranked_by_what_is_predicted():
    assert [candidate.replicas for candidate in _plan(1).candidates] == [1]
    asked: tuple[tuple[Goal, str], ...] = (("throughput", "tokens_per_s"), ("latency", "per_token_s"))
    for goal, key in asked:
        for concurrency in (4, 8):
            found = _plan(concurrency, goal=goal).candidates
            values = [getattr(candidate.predicted, key) for candidate in found]
            assert len(values) == 2
            assert values == sorted(values, reverse=goal == "throughput")


def test_without_a_measured_memory_one_copy_is_the_guess():
    first, second = _plan(8, bandwidth=None).candidates
    assert (first.replicas, second.replicas) == (1, 2)
