"""One vLLM replica over several machines: what stands on this one, and which numbers make no set of nodes."""

import pytest

from llamarack.config import Group
from llamarack.errors import ConfigError
from llamarack.plan.nodes import node_of
from llamarack.plan.planner import plan_group
from llamarack.plan.reference import safetensors_spec
from tests.plan.shapes import LLAMA2_13B, h200, machine


def group(**values) -> Group:
    return Group(engine="vllm", **values)


def test_half_of_the_ranks_stand_on_each_of_two_nodes():
    spec = safetensors_spec(LLAMA2_13B, "f16")
    args = {"nnodes": 2, "node-rank": 0, "master-addr": "10.0.0.1"}
    spread = plan_group(spec, group(tensor_parallel=4, engine_args=args), machine(h200(0), h200(1)), model_name="m")
    whole = plan_group(spec, group(tensor_parallel=4), machine(*map(h200, range(4))), model_name="m")
    assert spread.fits
    assert spread.replica_cards == ((0, 1),)
    assert [card.terms for card in spread.cards] == [card.terms for card in whole.cards[:2]]
    assert any("ranks 0 to 1 of 4 run on this machine" in note for note in spread.reasons)
    assert spread.predicted.tokens_per_s is None
    assert whole.predicted.tokens_per_s is not None


def test_stages_over_two_nodes_leave_the_first_stage_here():
    spec = safetensors_spec(LLAMA2_13B, "f16")
    args = {"nnodes": "2"}
    (here,) = plan_group(spec, group(pipeline_parallel=2, engine_args=args), machine(h200()), model_name="m").cards
    both = plan_group(spec, group(pipeline_parallel=2), machine(h200(0), h200(1)), model_name="m").cards
    assert here.terms == both[0].terms


def test_too_many_cards_for_this_node_are_refused():
    spec = safetensors_spec(LLAMA2_13B, "f16")
    asked = group(tensor_parallel=4, gpus=[0, 1, 2], engine_args={"nnodes": 2})
    candidate = plan_group(spec, asked, machine(*map(h200, range(3))), model_name="m")
    assert "tensor_parallel x pipeline_parallel is 4, 2 of them on each of 2 nodes, 3 cards are given" in (
        candidate.reasons
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"nnodes": 3}, "4 ranks (tensor_parallel x pipeline_parallel) do not divide by 3 nodes"),
        ({"nnodes": 8}, "engine_args.nnodes: 8 given"),
        ({"nnodes": "two"}, "engine_args.nnodes: two given"),
        ({"--nnodes": 2, "node_rank": 1}, "only node 0 answers requests"),
        ({"nnodes": 2, "node-rank": 2}, "engine_args.node-rank: 2 given"),
    ],
)
def test_numbers_that_make_no_set_of_nodes_are_named(args, words):
    with pytest.raises(ConfigError) as refused:
        node_of(group(tensor_parallel=4, engine_args=args))
    assert words in str(refused.value)
