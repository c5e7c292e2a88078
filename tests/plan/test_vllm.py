"""vLLM: what ranks hold, which cuts are refused and in which words, what the budget leaves."""

from dataclasses import replace

import pytest

from llamarack.config import Group, Limits
from llamarack.errors import ConfigError
from llamarack.plan import vllm
from llamarack.plan.planner import plan_group
from llamarack.plan.reference import Dimensions, gguf_spec, safetensors_spec
from llamarack.plan.shape import shape_of
from llamarack.plan.vllm_shard import illegal_cut, shard, stage_layers
from llamarack.units import GIB, MIB
from tests.plan.shapes import LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, LLAMA3_8B, SMOLLM2, card, h200, machine


@pytest.mark.parametrize(
    ("size", "method", "degree", "words"),
    [
        (SMOLLM2, "f16", 2, "9 heads do not divide by 2"),
        (LLAMA2_7B, "f16", 3, "32 heads do not divide by 3"),
        (LLAMA2_7B, "gptq", 4, "GPTQ group 128 does not divide 11008/4"),
        (LLAMA2_7B, "awq", 4, "AWQ group 128 does not divide 11008/4"),
        (LLAMA2_13B, "gptq", 8, "GPTQ group 128 does not divide 13824/8"),
        (SMOLLM2, "f16", 2, "3 KV heads neither divide by 2 nor into it"),
    ],
)
def test_illegal_cut_says_what_does_not_divide(size, method, degree, words):
    assert any(words in reason for reason in illegal_cut(safetensors_spec(size, method), degree, 1))


@pytest.mark.parametrize(
    ("size", "method", "degree"),
    [
        (LLAMA2_7B, "gptq", 2),
        (LLAMA2_13B, "gptq", 2),
        (LLAMA2_13B, "awq", 4),
        (LLAMA2_70B, "gptq", 8),
        (LLAMA2_70B, "f16", 16),
        (LLAMA3_8B, "fp8", 8),
        (LLAMA2_7B, "int8", 4),
    ],
)
def test_legal_cut_has_no_reason(size, method, degree):
    assert illegal_cut(safetensors_spec(size, method), degree, 1) == []


def test_gguf_and_unknown_quantisation_are_refused_in_words():
    assert illegal_cut(gguf_spec(LLAMA2_7B, "Q8_0"), 1, 1) == ["vllm reads safetensors; this model is a GGUF file"]
    spec = safetensors_spec(LLAMA2_7B, "gptq")
    odd = replace(spec, quantization=replace(spec.quantization, method="hqq"))
    assert illegal_cut(odd, 1, 1) == ["vllm has no rule here for the quantisation `hqq`"]


def test_kv_heads_are_copied_when_there_are_more_cards():
    shape = shape_of(safetensors_spec(LLAMA2_70B, "f16"))
    eight, sixteen = (shard(shape, degree, 1)[0].weights_bytes for degree in (8, 16))
    kv_matrices = 80 * 2 * 8192 * 8 * 128 * 2
    assert sixteen - kv_matrices / 8 == pytest.approx((eight - kv_matrices / 8) / 2, rel=1e-3)
    settings = vllm.Settings(sequences=8, context_tokens=4096, kv_dtype="f16", batch_tokens=8192, tensor_parallel=16)
    (load,) = vllm.rank_loads(shape, settings, vllm.constants_of(None))
    assert load.page_bytes == 16 * 80 * 1 * 256 * 2


def test_vocabulary_is_padded_before_it_is_cut():
    odd = Dimensions(
        name="odd", layers=1, hidden_size=256, feed_forward_size=512, attention_heads=2, kv_heads=2, vocab_size=1001
    )
    shape = shape_of(safetensors_spec(odd, "f16"))
    whole = shape.spec.weights_bytes
    (rank,) = shard(shape, 1, 1)
    assert rank.weights_bytes - whole == 2 * (1024 - 1001) * 256 * 2


def test_tied_embedding_is_held_once_on_one_stage_and_on_both_ends_of_several():
    spec = safetensors_spec(SMOLLM2, "f16")
    shape = shape_of(spec)
    table = SMOLLM2.vocab_size * SMOLLM2.hidden_size * 2
    assert shard(shape, 1, 1)[0].weights_bytes == spec.weights_bytes
    assert sum(rank.weights_bytes for rank in shard(shape, 1, 2)) == spec.weights_bytes + table


def test_odd_layers_go_to_the_stages_before_the_last():
    assert [len(span) for span in stage_layers(80, 3)] == [27, 27, 26]
    assert [len(span) for span in stage_layers(33, 4)] == [8, 8, 9, 8]


def test_weights_of_gptq_shrink_with_the_degree_and_g_idx_is_copied():
    shape = shape_of(safetensors_spec(LLAMA2_13B, "gptq"))
    one, two = (shard(shape, degree, 1)[0].weights_bytes for degree in (1, 2))
    index = 40 * (6 * 5120 + 13824) * 4
    cut_by_input = 40 * (5120 + 13824) * 4
    copied = index - cut_by_input
    assert two == pytest.approx((one - copied) / 2 + copied, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "gib", "tokens"),
    [("NVIDIA H200", 140, 8192), ("NVIDIA A100-SXM4-80GB", 80, 2048), ("RTX 4090", 24, 2048), ("B200", 179, 16384)],
)
def test_step_size_follows_the_card(name, gib, tokens):
    assert vllm.default_batch_tokens(name, gib * GIB) == tokens


@pytest.mark.parametrize(
    ("sequences", "batch_tokens", "pieces", "largest", "whole"),
    # Counts that vLLM 0.25.1 printed while it captured, on an H200; the last three by its rule.
    [
        (1024, 8192, 51, 512, 51),
        (128, 8192, 35, 256, 19),
        (128, 2048, 35, 256, 19),
        (1, 2048, 2, 2, 1),
        (100, 2048, 29, 200, 16),
        (256, 100, 16, 100, 16),
    ],
)
def test_graphs_in_pieces_to_twice_the_sequences_and_whole_ones_to_the_sequences(
    sequences, batch_tokens, pieces, largest, whole
):
    piecewise, full = vllm.graph_sizes(sequences, batch_tokens)
    assert (len(piecewise), piecewise[-1], len(full)) == (pieces, largest, whole)


def test_poorest_card_sets_the_kv_cache_and_the_plan_says_what_is_wasted():
    spec = safetensors_spec(LLAMA2_13B, "f16")
    cards = machine(card(0, "NVIDIA A100-SXM4-80GB", 81920), card(1, "NVIDIA GeForce RTX 4090", 24564))
    group = Group(engine="vllm", gpus=[0, 1], tensor_parallel=2, limits=Limits(sequences=1))
    plan = plan_group(spec, group, cards, model_name="m")
    assert plan.cards[0].terms.kv_bytes == plan.cards[1].terms.kv_bytes
    assert any("poorest card sets the KV cache of all" in reason for reason in plan.reasons)


def test_kv_cache_bytes_wins_over_the_fraction():
    spec = safetensors_spec(LLAMA2_7B, "f16")
    group = Group(engine="vllm", limits=Limits(sequences=2, kv_cache_bytes=4 * GIB))
    plan = plan_group(spec, group, machine(h200()), model_name="m")
    assert plan.cards[0].terms.kv_bytes == pytest.approx(4 * GIB, abs=16 * 524288)
    assert plan.cards[0].terms.kv_bytes <= 4 * GIB


def test_memory_that_others_hold_lowers_the_fraction():
    spec = safetensors_spec(LLAMA2_7B, "f16")
    group = Group(engine="vllm", limits=Limits(sequences=2))
    alone = plan_group(spec, group, machine(h200()), model_name="m")
    beside = plan_group(spec, group, machine(h200()), model_name="m", claimed_bytes={0: 80 * GIB})
    assert alone.gpu_memory_fraction == 0.9
    assert beside.gpu_memory_fraction is not None
    assert beside.gpu_memory_fraction < 0.45
    assert beside.fits
    assert beside.cards[0].total_high_bytes <= 143771 * MIB - 80 * GIB


def test_kv_type_that_vllm_does_not_have_is_refused():
    group = Group(engine="vllm", limits=Limits(kv_dtype="q8_0"))
    with pytest.raises(ConfigError, match="vllm has no `q8_0`"):
        plan_group(safetensors_spec(LLAMA2_7B, "f16"), group, machine(h200()), model_name="m")


def test_fp8_cache_doubles_the_tokens():
    spec = safetensors_spec(LLAMA2_7B, "f16")
    half, full = (
        plan_group(
            spec, Group(engine="vllm", limits=Limits(sequences=1, kv_dtype=kv)), machine(h200()), model_name="m"
        ).max_sequences
        for kv in ("f16", "fp8")
    )
    assert half is not None
    assert full is not None
    assert full in (2 * half, 2 * half + 1)
