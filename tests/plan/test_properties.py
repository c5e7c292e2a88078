"""What must hold for every plan, whatever the numbers."""

from dataclasses import replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llamarack.config import Group, Limits
from llamarack.plan import llamacpp
from llamarack.plan.catalogue import machine_of
from llamarack.plan.engine_data import llamacpp_law
from llamarack.plan.limits import largest
from llamarack.plan.planner import plan_group, plan_model
from llamarack.plan.record import Load
from llamarack.plan.reference import gguf_spec, safetensors_spec
from llamarack.plan.shape import shape_of
from llamarack.plan.vllm_shard import illegal_cut, shard, stage_layers
from tests.plan.shapes import LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, LLAMA3_8B, SMOLLM2, machine

SIZES = st.sampled_from([LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, LLAMA3_8B, SMOLLM2])
SPECS = {
    (size.name, kind): make(size, kind)
    for size in (LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, LLAMA3_8B, SMOLLM2)
    for make, kind in ((gguf_spec, "Q8_0"), (safetensors_spec, "f16"))
}
GPUS = st.sampled_from(["H200", "RTX 4090 x2", "A100-80 x4", "RTX 4090 x2 + A100-80 x1", "L4 x8"])
CONTEXTS = st.integers(256, 32768)
COUNTS = st.integers(1, 64)


def _group(engine: Any, context: int, sequences: int, gpus: str) -> Group:
    cards = len(machine_of(gpus).cards)
    return Group(
        engine=engine,
        gpus=list(range(cards)),
        tensor_parallel=1,
        pipeline_parallel=cards if engine == "vllm" else 1,
        split_mode="layer" if cards > 1 else "none",
        limits=Limits(context_tokens=context, sequences=sequences),
    )


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(["llamacpp", "vllm"]), GPUS, CONTEXTS, COUNTS, st.integers(0, 8192), st.integers(0, 32))
def test_memory_never_falls_with_context_or_sequences(size, engine, gpus, context, sequences, more, others):
    spec = SPECS[size.name, "f16" if engine == "vllm" else "Q8_0"]
    small, large = (
        plan_group(spec, _group(engine, c, s, gpus), machine_of(gpus), model_name="m", is_kv_shared=True)
        for c, s in ((context, sequences), (context + more, sequences + others))
    )
    # A split by free memory moves whole layers when buffers grow: the sum is what must not fall.
    assert sum(card.total_bytes for card in large.cards) >= sum(card.total_bytes for card in small.cards) - 16
    if large.fits:
        assert small.fits


@settings(max_examples=40, deadline=None)
@given(SIZES, st.sampled_from(["llamacpp", "vllm"]), GPUS, CONTEXTS, COUNTS)
def test_totals_are_the_sums_of_terms_and_the_upper_end_is_not_below(size, engine, gpus, context, sequences):
    spec = SPECS[size.name, "f16" if engine == "vllm" else "Q8_0"]
    plan = plan_group(spec, _group(engine, context, sequences, gpus), machine_of(gpus), model_name="m")
    for card in plan.cards:
        assert card.memory_free_bytes is not None
        terms = card.terms
        parts = [getattr(terms, name) for name in terms.__slots__]
        assert card.total_bytes == sum(parts)
        assert all(part >= 0 for part in parts)
        assert card.total_high_bytes >= card.total_bytes
        assert card.free_after_bytes == card.memory_free_bytes - card.total_bytes
        if plan.fits:
            assert card.total_high_bytes <= card.memory_free_bytes


@settings(max_examples=60, deadline=None)
@given(SIZES, CONTEXTS, COUNTS, st.sampled_from([128, 512, 2048]), st.sampled_from(["f16", "q8_0", "q4_0"]))
def test_upper_end_covers_the_dry_run_that_wants_logits_of_every_token(size, context, sequences, micro, kv):
    """The dry run's law of b11434, written out again."""
    shape = shape_of(SPECS[size.name, "Q8_0"])
    one = llamacpp.Settings(sequences=sequences, context_tokens=context, micro_batch_tokens=micro, kv_dtype=kv)
    (load,), _ = llamacpp.on_cards(shape, one, [llamacpp_law("cuda", 11434)], [1.0])
    cells, hidden = -(-context // 256) * 256, size.hidden_size
    peaks = [4 * micro * (3 * size.feed_forward_size + 4 * hidden), 4 * micro * (size.vocab_size + 4 * hidden)]
    if kv != "f16":
        peaks.append(2 * cells * size.kv_heads * 2 * size.head_size + 4 * micro * 5 * hidden)
    assert load.compute_high_bytes >= 2 * micro * cells + max(peaks)


@settings(max_examples=30, deadline=None)
@given(SIZES, GPUS, CONTEXTS, COUNTS)
def test_limits_are_the_last_that_fit(size, gpus, context, sequences):
    spec, cards = SPECS[size.name, "Q8_0"], machine_of(gpus)
    group = _group("llamacpp", context, sequences, gpus)
    plan = plan_group(spec, group, cards, model_name="m")

    def fits(count: int) -> bool:
        limits = replace(group.limits, sequences=count)
        return plan_group(spec, replace(group, limits=limits), cards, model_name="m").fits

    assert plan.max_sequences is not None
    assert plan.fits == (plan.max_sequences >= sequences)
    if plan.max_sequences:
        assert fits(plan.max_sequences)
    if plan.max_sequences < 4096:
        assert not fits(plan.max_sequences + 1)


@given(st.integers(0, 300), st.integers(1, 200))
def test_largest_finds_the_edge(edge, most):
    assert largest(lambda count: count <= edge, most) == min(edge, most)


@given(st.integers(1, 200), st.integers(1, 32))
def test_stages_share_out_every_layer_in_order(layers, stages):
    if stages > layers:
        return
    spans = stage_layers(layers, stages)
    assert [layer for span in spans for layer in span] == list(range(layers))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


@settings(max_examples=25, deadline=None)
@given(SIZES, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_ranks_hold_at_least_the_whole_model(size, tensor, pipeline):
    spec = SPECS[size.name, "f16"]
    assume(not illegal_cut(spec, tensor, pipeline))
    ranks = shard(shape_of(spec), tensor, pipeline)
    assert tensor * sum(rank.weights_bytes for rank in ranks) >= spec.weights_bytes - 64


@settings(max_examples=15, deadline=None)
@given(SIZES, GPUS, st.integers(1, 128), st.sampled_from(["throughput", "latency"]))
def test_ranking_puts_what_fits_first_and_gives_every_refusal_a_reason(size, gpus, concurrency, goal):
    plan = plan_model(
        SPECS[size.name, "Q8_0"],
        machine_of(gpus),
        Load(context_tokens=4096, concurrency=concurrency),
        model_name="m",
        others=[SPECS[size.name, "f16"]],
        goal=goal,
    )
    fits = [one.fits for one in plan.candidates]
    assert fits == sorted(fits, reverse=True)
    for one in plan.candidates:
        assert one.fits or one.reasons
        assert one.replicas * one.sequences >= concurrency
        flat = [index for cards in one.replica_cards for index in cards]
        assert len(flat) == len(set(flat))
    assert plan.best is None or plan.best is plan.candidates[0]


def test_machine_without_cards_is_planned_as_one_device():
    plan = plan_group(SPECS[SMOLLM2.name, "Q8_0"], Group(), machine(), model_name="m")
    assert [card.index for card in plan.cards] == [-1]
    assert plan.replica_cards == ((),)
    assert plan.fits
