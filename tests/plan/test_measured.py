"""Memory of both engines on one H200, 30 November 2026. In sample: constants were taken from these runs."""

import pytest

from llamarack.config import Group, Limits
from llamarack.plan.planner import plan_group
from llamarack.plan.reference import gguf_spec, safetensors_spec
from llamarack.units import GIB, MIB
from tests.plan.shapes import LLAMA2_7B, h200, machine


# KV type, n_ctx, MiB: weights, KV, compute, all that nvidia-smi shows.
@pytest.mark.parametrize(
    ("kv", "context", "weights", "cache", "compute", "used"),
    [
        ("f16", 4096, 12603.02, 2048.00, 100.51, 15349),
        ("f16", 16384, 12603.02, 8192.00, 112.51, 21505),
        ("q8_0", 4096, 12603.02, 1088.00, 108.09, 14397),
        ("q8_0", 16384, 12603.02, 4352.00, 312.09, 17865),
    ],
)
def test_llamacpp_terms_within_2_percent_and_the_card_within_1(kv, context, weights, cache, compute, used):
    group = Group(limits=Limits(context_tokens=context, sequences=1, kv_dtype=kv))
    (card,) = plan_group(gguf_spec(LLAMA2_7B, "F16"), group, machine(h200()), model_name="m").cards
    terms = card.terms
    assert terms.weights_bytes / MIB == pytest.approx(weights, rel=0.02)
    assert terms.kv_bytes / MIB == pytest.approx(cache, rel=0.02)
    assert terms.compute_bytes / MIB == pytest.approx(compute, rel=0.02)
    assert card.total_bytes / MIB == pytest.approx(used, rel=0.0001)
    assert card.total_high_bytes / MIB >= used - 0.5


def test_vllm_terms_within_2_percent_and_the_card_within_1():
    group = Group(engine="vllm", limits=Limits(context_tokens=4096, sequences=1024, gpu_memory_fraction=0.92))
    plan = plan_group(safetensors_spec(LLAMA2_7B, "f16"), group, machine(h200()), model_name="m")
    (card,) = plan.cards
    assert card.terms.weights_bytes / GIB == pytest.approx(12.55, rel=0.02)
    assert card.terms.kv_bytes / GIB == pytest.approx(115.06, rel=0.02)
    assert card.terms.graphs_bytes / GIB == pytest.approx(0.73, rel=0.02)
    assert card.total_bytes / MIB == pytest.approx(132_605, rel=0.01)
    assert card.total_high_bytes / MIB >= 132_605
    tokens = int(plan.reasons[0].split("holds ")[1].split(" tokens")[0].replace(",", ""))
    assert tokens == pytest.approx(235_632, rel=0.01)
    assert plan.max_sequences == 57
    assert plan.fits
