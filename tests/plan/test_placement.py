"""Which ways are offered, which are refused, and in which words."""

from dataclasses import replace

import pytest

from llamarack.config import Group, Limits
from llamarack.errors import ConfigError
from llamarack.hardware.machine import LinkKind
from llamarack.plan.catalogue import machine_of
from llamarack.plan.placement import kinds, senseless_exchange
from llamarack.plan.placement import ways as all_ways
from llamarack.plan.planner import plan_group, plan_model
from llamarack.plan.record import Candidate, Load, Plan
from llamarack.plan.reference import gguf_spec, safetensors_spec
from llamarack.plan.shape import shape_of
from tests.plan.shapes import LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, card, linked, machine


def _plan(spec, gpus, *, context=4096, concurrency=8, **more) -> Plan:
    there = machine_of(gpus) if isinstance(gpus, str) else gpus
    return plan_model(spec, there, Load(context_tokens=context, concurrency=concurrency), model_name="m", **more)


def _refused(plan: Plan, words: str) -> list[Candidate]:
    return [one for one in plan.candidates if not one.fits and any(words in reason for reason in one.reasons)]


def test_13b_fp16_on_one_24_gb_card_is_refused_with_what_would_do():
    plan = _plan(safetensors_spec(LLAMA2_13B, "f16"), "RTX 4090", concurrency=1)
    assert plan.best is None
    assert any(note.startswith("W8A8") and "--concurrency up to" in note for note in plan.notes)
    assert any("these cards would do" in note for note in plan.notes)


def test_13b_fp16_on_two_24_gb_cards_is_tight_with_tp_2():
    plan = _plan(safetensors_spec(LLAMA2_13B, "f16"), "RTX 4090 x2", concurrency=5)
    assert plan.best is not None
    assert (plan.best.tensor_parallel, plan.best.tight) == (2, True)
    assert plan.best.max_sequences == 5
    six = _plan(safetensors_spec(LLAMA2_13B, "f16"), "RTX 4090 x2", concurrency=6)
    assert six.best is None
    assert any(note.startswith("--concurrency 5 fits") for note in six.notes)


def test_70b_on_one_80_and_two_24_gb_cards_splits_by_memory():
    plan = _plan(gguf_spec(LLAMA2_70B, "Q8_0"), "RTX 4090 x2 + A100-80")
    best = plan.best
    assert best is not None
    assert (best.engine, best.split_mode, best.replica_cards) == ("llamacpp", "layer", ((0, 1, 2),))
    assert best.tensor_split is not None
    assert best.tensor_split[2] / best.tensor_split[0] == pytest.approx(80 / 24, rel=0.1)


def test_70b_f16_on_three_80_and_two_24_gb_cards_fits_in_several_ways():
    plan = _plan(gguf_spec(LLAMA2_70B, "F16"), "A100-80 x3 + RTX 4090 x2")
    fitting = {one.replica_cards for one in plan.candidates if one.fits}
    assert tuple(hand for (hand,) in sorted(fitting, key=lambda c: len(c[0]))) == ((0, 1), (0, 1, 2), (0, 1, 2, 3, 4))
    assert _refused(plan, "A100-SXM4-80GB) needs")


def test_vllm_over_unequal_cards_says_what_is_wasted():
    plan = _plan(safetensors_spec(LLAMA2_13B, "f16"), "RTX 4090 + A100-80", concurrency=2)
    mixed = [one for one in plan.candidates if one.engine == "vllm" and len(one.cards) == 2 and one.fits]
    assert mixed
    assert all(any("of the richest stay unused" in reason for reason in one.reasons) for one in mixed)


def test_all_reduce_over_pcie_is_the_reason_against_tp_4():
    plan = _plan(safetensors_spec(LLAMA2_70B, "f16"), "L40S x4")
    (refused,) = _refused(plan, "PCIe only: the all-reduce of a 4096-token prefill over 4 cards alone takes 8.70 s")
    assert refused.tensor_parallel == 4
    assert plan.best is not None
    assert plan.best.pipeline_parallel > 1


def test_nvlink_makes_the_same_cut_sensible():
    shape = shape_of(safetensors_spec(LLAMA2_70B, "f16"))
    cards = machine_of("L40S x4").cards
    assert senseless_exchange(shape, cards, 4)
    assert senseless_exchange(shape, linked(list(cards), LinkKind.NVLINK), 4) is None
    assert senseless_exchange(shape, cards, 1) is None


def test_mig_slices_are_cards_and_never_share_a_group():
    parent = card(0, "NVIDIA A100-SXM4-80GB", 81920)
    slices = [replace(card(i, "NVIDIA A100 MIG 3g.40gb", 40192), mig_parent_uuid=parent.uuid) for i in (1, 2)]
    there = machine(parent, *slices)
    assert [tuple(one.index for one in kind) for kind in kinds(there)] == [(1, 2)]
    plan = _plan(safetensors_spec(LLAMA2_7B, "f16"), there, concurrency=2, engines=("vllm",))
    assert plan.best is not None
    assert plan.best.replica_cards == ((1,), (2,))
    assert {one.tensor_parallel * one.pipeline_parallel for one in plan.candidates if one.fits} == {1}
    assert _refused(plan, "a slice never shares a group")


def test_finer_file_leads_where_both_fit_and_yields_where_it_does_not():
    fine, coarse = gguf_spec(LLAMA2_13B, "Q8_0"), gguf_spec(LLAMA2_13B, "Q4_K_M")
    roomy = _plan(coarse, "A100-80", others=[fine]).best
    narrow = _plan(coarse, "RTX 4090", others=[fine], concurrency=4).best
    assert roomy is not None
    assert narrow is not None
    assert (roomy.quantization, narrow.quantization) == ("Q8_0", "Q4_K_M")


def test_few_and_many_users_lead_to_different_engines_and_the_plan_says_so():
    """As measured on one H200: llama.cpp Q4_K_M leads vLLM fp16 at 1, vLLM leads at 64."""
    files = [gguf_spec(LLAMA2_7B, "Q4_K_M"), safetensors_spec(LLAMA2_7B, "f16")]
    few, many = (_plan(files[0], "H200", context=1024, others=files[1:], concurrency=count).best for count in (1, 64))
    assert few is not None
    assert many is not None
    assert (few.engine, many.engine) == ("llamacpp", "vllm")
    notes = _plan(files[0], "H200", context=1024, others=files[1:]).notes
    assert any(note.startswith("with 1 at once llamacpp leads vllm") for note in notes)
    assert any(note.startswith("with 64 at once vllm leads llamacpp") for note in notes)


def test_goal_latency_cuts_layers_where_throughput_copies_the_model():
    spec = safetensors_spec(LLAMA2_13B, "f16")
    latency = _plan(spec, "H200 x4", concurrency=64, goal="latency").best
    assert latency is not None
    assert latency.tensor_parallel == 4


def test_two_h200_as_one_group_lead_two_replicas_as_measured():
    """LLaMA-2-13B fp16, 128 in, 256 out: TP 2 over two replicas 1.49 at 1, 1.39 at 16 and 1.14 at 128. Held out."""
    spec = safetensors_spec(LLAMA2_13B, "f16")
    for concurrency, measured in ((1, 1.49), (16, 1.39), (128, 1.14)):
        load = Load(context_tokens=384, concurrency=concurrency, input_tokens=128, output_tokens=256)
        plan = plan_model(spec, machine_of("H200 x2"), load, model_name="m", engines=("vllm",), want_notes=False)
        ways = [one for one in plan.candidates if one.pipeline_parallel == 1]
        rates = {(one.tensor_parallel, one.replicas): one.predicted.tokens_per_s for one in ways}
        group = rates[2, 1]
        copies = rates[1, 2] if concurrency > 1 else rates[1, 1]
        assert group is not None
        assert copies is not None
        assert group / copies == pytest.approx(measured, rel=0.2)


def test_ways_of_eight_cards_cover_every_cut_and_every_number_of_replicas():
    there = machine_of("H200 x8")
    cuts = {(way.tensor_parallel, way.pipeline_parallel, len(way.replicas)) for way in all_ways("vllm", there, 99)}
    expected = {(t, p, r) for t in range(1, 9) for p in range(1, 9) for r in range(1, 9) if t * p * r <= 8}
    assert cuts == expected
    assert max(len(way.replicas) for way in all_ways("vllm", there, 3)) == 3


def test_linked_pairs_stay_together():
    cards = list(machine_of("RTX 3090 x4").cards)
    pairs = {0: 2, 2: 0, 1: 3, 3: 1}
    paired = [
        replace(
            one,
            links=tuple(
                replace(link, kind=LinkKind.NVLINK) if link.peer_index == pairs[one.index] else link
                for link in one.links
            ),
        )
        for one in cards
    ]
    two = [way for way in all_ways("vllm", machine(*paired), 2) if way.tensor_parallel == 2 and len(way.replicas) == 2]
    assert {tuple(card.index for card in hand) for hand in two[0].replicas} == {(0, 2), (1, 3)}


def test_auto_cards_take_the_fewest_that_fit():
    spec = gguf_spec(LLAMA2_70B, "Q4_K_M")
    plan = plan_group(spec, Group(limits=Limits(sequences=1)), machine_of("RTX 4090 x4"), model_name="m")
    assert plan.fits
    assert plan.replica_cards == ((0, 1),)


def test_two_replicas_on_one_card_each_see_what_the_other_left():
    spec = gguf_spec(LLAMA2_13B, "Q8_0")
    one = Group(gpus=[[0]], limits=Limits(sequences=1))
    two = Group(gpus=[[0], [0]], replicas=2, limits=Limits(sequences=1))
    there = machine_of("RTX 4090")
    assert plan_group(spec, one, there, model_name="m").fits
    assert not plan_group(spec, two, there, model_name="m").fits


def test_kv_type_of_one_engine_leaves_the_other_out():
    spec, asked = safetensors_spec(LLAMA2_13B, "f16"), Limits(kv_dtype="fp8")
    assert _plan(spec, "RTX 4090 x2", concurrency=8, limits=asked).best is not None
    both = _plan(gguf_spec(LLAMA2_13B, "Q8_0"), "RTX 4090 x2", others=[spec], limits=asked)
    assert both.best is not None
    assert both.best.engine == "vllm"
    with pytest.raises(ConfigError, match="llamacpp has no `fp8`"):
        _plan(gguf_spec(LLAMA2_13B, "Q8_0"), "RTX 4090 x2", limits=asked)


def test_a_faster_way_that_is_not_first_is_told_with_its_reason():
    notes = _plan(gguf_spec(LLAMA2_13B, "Q8_0"), "RTX 4090 x2", concurrency=5).notes
    assert any("split by tensor on cards 0,1, but not first: llama.cpp calls its" in note for note in notes)
    notes = _plan(gguf_spec(LLAMA2_13B, "Q8_0"), "A100-80 x2", concurrency=5, goal="latency").notes
    assert any("but not first" in note for note in notes)
    notes = _plan(safetensors_spec(LLAMA2_7B, "f16"), "A100-80").notes
    assert not any("but not first" in note for note in notes)
