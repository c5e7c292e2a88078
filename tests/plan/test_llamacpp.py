"""llama.cpp's memory against figures that the engine itself printed."""

import csv
from importlib.resources import files

import pytest

from llamarack.config import Group, Limits
from llamarack.errors import ConfigError
from llamarack.plan import llamacpp
from llamarack.plan.engine_data import llamacpp_law
from llamarack.plan.planner import plan_group
from llamarack.plan.reference import Dimensions, gguf_spec
from llamarack.plan.shape import shape_of
from llamarack.units import MIB
from tests.plan.shapes import LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, LLAMA3_8B, SMOLLM2, h200, machine

TSV = "llamacpp_b11434_cuda_sm90.tsv"


def _wide(name: str, *, feed_forward_size: int, kv_heads: int) -> Dimensions:
    return Dimensions(
        name=name, layers=8, hidden_size=4096, feed_forward_size=feed_forward_size, attention_heads=32,
        kv_heads=kv_heads,
    )  # fmt: skip


# The shapes behind the dry runs: known models, and made ones that vary one dimension at a time.
SHAPES = {
    "llama2-7b": LLAMA2_7B,
    "llama2-13b": LLAMA2_13B,
    "llama2-70b": LLAMA2_70B,
    "llama3-8b": LLAMA3_8B,
    "h4096-i2048": _wide("h4096-i2048", feed_forward_size=2048, kv_heads=32),
    "h4096-i4096": _wide("h4096-i4096", feed_forward_size=4096, kv_heads=32),
    **{f"h4096-kv{n}": _wide(f"h4096-kv{n}", feed_forward_size=11008, kv_heads=n) for n in (1, 2, 4, 8, 16)},
    "h2048-d64": Dimensions(
        name="h2048-d64", layers=22, hidden_size=2048, feed_forward_size=5632, attention_heads=32, kv_heads=4,
        head_size=64,
    ),
    "h2048-d128": Dimensions(
        name="h2048-d128", layers=16, hidden_size=2048, feed_forward_size=8192, attention_heads=16, kv_heads=16
    ),
}  # fmt: skip


def rows() -> list[dict[str, str]]:
    text = files("llamarack.plan").joinpath("data", TSV).read_text()
    return list(csv.DictReader(text.splitlines(), delimiter="\t"))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_dry_run_rows_of_b11434_are_reproduced_to_the_printed_mib(name):
    """In sample: the law was fitted to these rows."""
    shape = shape_of(gguf_spec(SHAPES[name], "F16"))
    law = llamacpp_law("cuda", 11434)
    own = [row for row in rows() if row["model"] == name]
    assert len(own) >= 12
    for row in own:
        slots, cells = int(row["n_parallel"]), int(row["n_ctx"])
        settings = llamacpp.Settings(
            sequences=slots,
            context_tokens=cells // slots,
            kv_dtype=row["kv_type"],
            micro_batch_tokens=int(row["n_ubatch"]),
            flash_attention=row["flash_attn"] == "on",
        )
        (load,), host_bytes = llamacpp.on_cards(shape, settings, [law], [1.0])
        printed = {key: int(row[key]) for key in ("model_mib", "context_mib", "compute_mib", "host_model_mib")}
        planned = {
            "model_mib": load.weights_bytes // MIB,
            "context_mib": load.kv_bytes // MIB,
            "compute_mib": load.compute_high_bytes // MIB,
            "host_model_mib": host_bytes // MIB,
        }
        assert planned == printed, row


def test_full_attention_without_flash_needs_more_than_with_it():
    shape = shape_of(gguf_spec(LLAMA2_7B, "F16"))
    law = llamacpp_law("cuda", 11434)
    settings = [
        llamacpp.Settings(sequences=1, context_tokens=4096, flash_attention=is_on, kv_dtype="f16")
        for is_on in (True, False)
    ]
    with_flash, without = (llamacpp.compute_bytes(shape, one, law, outputs=1) for one in settings)
    assert without > with_flash


# n_ctx, slots, KV type, KV MiB: printed by dry runs of b11434 (planning notes of November 2026).
@pytest.mark.parametrize(
    ("size", "context", "slots", "kv", "mib"),
    [
        (LLAMA2_7B, 4096, 1, "f16", 2048),
        (LLAMA2_7B, 4096, 1, "q8_0", 1088),
        (LLAMA2_7B, 4096, 1, "q4_0", 576),
        (LLAMA2_13B, 4096, 1, "f16", 3200),
        (LLAMA2_13B, 4096, 1, "q4_0", 900),
        (LLAMA2_70B, 4096, 1, "q8_0", 680),
        (LLAMA3_8B, 4096, 1, "q4_0", 144),
        (LLAMA2_7B, 1666, 3, "f16", 3 * 1792 / 2),
    ],
)
def test_kv_cache_is_padded_per_slot_and_sized_by_type(size, context, slots, kv, mib):
    shape = shape_of(gguf_spec(size, "F16"))
    settings = llamacpp.Settings(sequences=slots, context_tokens=context, kv_dtype=kv)
    assert llamacpp.kv_bytes(shape, settings, range(size.layers)) == mib * MIB


# Settings and MiB printed by xllamacpp 2026.10.11549 on a CPU for SmolLM2-135M (context of one slot, slots, n_ubatch).
@pytest.mark.parametrize(
    ("context", "slots", "micro", "unified", "kv", "kv_mib", "compute_mib", "output_mib"),
    [
        (2048, 4, 512, False, "f16", 180.0, 16.64, 0.75),
        (2048, 4, 128, False, "f16", 180.0, 4.16, 0.75),
        (2048, 4, 2048, False, "f16", 180.0, 66.57, 0.75),
        (8192, 4, 512, False, "f16", 720.0, 22.64, 0.75),
        (32768, 1, 512, False, "f16", 720.0, 46.64, 0.19),
        (2048, 4, 512, False, "q8_0", 95.62, 16.67, 0.75),
        (8192, 4, 512, True, "f16", 180.0, 22.64, 0.75),
        (512, 16, 512, False, "f16", 180.0, 15.14, 3.0),
        (256, 64, 128, False, "f16", 360.0, 13.47, 12.0),
        (256, 64, 512, False, "f16", 360.0, 17.89, 12.0),
        (256, 64, 64, False, "f16", 360.0, 12.74, 12.0),
    ],
)
def test_cpu_buffers_of_the_built_in_worker_are_reproduced(
    context, slots, micro, unified, kv, kv_mib, compute_mib, output_mib
):
    shape = shape_of(gguf_spec(SMOLLM2, "Q4_1"))
    settings = llamacpp.Settings(
        sequences=slots, context_tokens=context, micro_batch_tokens=micro, kv_unified=unified, kv_dtype=kv
    )
    load = llamacpp.on_cpu(shape, settings, llamacpp_law("cpu", 11549))
    assert load.kv_bytes / MIB == pytest.approx(kv_mib, abs=0.01)
    assert load.compute_bytes / MIB == pytest.approx(compute_mib + output_mib, rel=0.003)
    assert load.compute_bytes / MIB >= compute_mib + output_mib - 0.01
    assert load.compute_high_bytes >= load.compute_bytes


# Qwen3-8B over two GPUs (Unsloth's published CUDA buffers of an older build): context, n_ubatch, MiB of each device.
@pytest.mark.parametrize(("context", "micro", "mib"), [(32768, 512, 256.04), (131072, 2048, 2560.16)])
def test_pipeline_copies_are_never_below_the_published_buffers(context, micro, mib):
    qwen = Dimensions(
        name="qwen3-8b", layers=36, hidden_size=4096, feed_forward_size=12288, attention_heads=32, kv_heads=8,
        vocab_size=151936,
    )  # fmt: skip
    shape = shape_of(gguf_spec(qwen, "Q8_0"))
    settings = llamacpp.Settings(sequences=1, context_tokens=context, micro_batch_tokens=micro)
    loads, _ = llamacpp.on_cards(shape, settings, [llamacpp_law("cuda", 11434)] * 2, [0.5, 0.5])
    for load in loads:
        assert mib <= load.compute_bytes / MIB + 0.2 <= 1.4 * mib  # the first keeps more inputs since
    assert loads[1].compute_bytes / MIB == pytest.approx(mib, rel=0.001)


LLAMA3 = Dimensions(
    name="llama3-8b", layers=32, hidden_size=4096, feed_forward_size=14336, attention_heads=32, kv_heads=8,
    vocab_size=128256,
)  # fmt: skip


# llama-fit-params of b11434 over RPC devices, n_ubatch 512, one sequence, Q8_0: whole MiB of weights, KV and compute.
@pytest.mark.parametrize(
    ("size", "context", "kv", "layers", "shares", "rows"),
    [
        (LLAMA2_7B, 4096, "f16", None, (1.0,), [(6695, 2048, 100)]),
        (LLAMA2_7B, 16384, "q8_0", None, (1.0,), [(6695, 4352, 112)]),
        (LLAMA2_7B, 4096, "f16", None, (0.5, 0.5), [(3486, 1088, 208), (3209, 960, 168)]),
        (LLAMA2_7B, 4096, "f16", None, (0.7, 0.3), [(4922, 1536, 208), (1773, 512, 168)]),
        (LLAMA2_7B, 4096, "f16", None, (1.0, 0.0), [(6695, 2048, 208), (0, 0, 0)]),
        (LLAMA2_7B, 4096, "f16", 20, (0.7, 0.3), [(2871, 896, 84), (1158, 320, 92)]),
        (LLAMA2_13B, 16384, "f16", None, (0.5, 0.5), [(6750, 6720, 305), (6273, 6080, 255)]),
        (LLAMA3, 16384, "q8_0", None, (0.5, 0.5), [(3757, 578, 268), (3847, 510, 386)]),
        (
            LLAMA3, 4096, "q8_0", None, (0.34, 0.33, 0.33),
            [(2652, 102, 220), (2431, 93, 180), (2521, 76, 338)],
        ),
    ],
)  # fmt: skip
def test_several_devices_hold_what_the_engines_own_dry_run_says(size, context, kv, layers, shares, rows):
    shape = shape_of(gguf_spec(size, "Q8_0"))
    settings = llamacpp.Settings(sequences=1, context_tokens=context, kv_dtype=kv, gpu_layers=layers)
    loads, _ = llamacpp.on_cards(shape, settings, [llamacpp_law("rpc", 11434)] * len(shares), shares)
    for load, (weights, kv_mib, compute) in zip(loads, rows, strict=True):
        assert load.weights_bytes // MIB == weights
        assert load.kv_bytes // MIB == kv_mib
        assert load.compute_high_bytes / MIB == pytest.approx(compute + 0.5, abs=0.52)


# SmolLM2-135M Q4_1 over three RPC devices (0.4, 0.3, 0.3), buffers printed by llama-server b11434: slots, cells of one
# slot, n_ubatch, KV type, layers on devices; MiB of each device's compute buffer.
@pytest.mark.parametrize(
    ("slots", "context", "micro", "kv", "layers", "mib"),
    [
        (1, 512, 512, "f16", None, (29.05, 18.91, 18.91)),
        (64, 512, 512, "f16", None, (29.05, 18.91, 18.92)),
        (1, 4096, 512, "f16", None, (43.05, 32.91, 32.91)),
        (1, 4096, 512, "q8_0", None, (42.05, 31.91, 31.91)),
        (1, 4096, 128, "f16", None, (10.76, 8.23, 8.23)),
        (1, 4096, 512, "f16", 20, (15.26, 15.26, 15.26)),
    ],
)
def test_a_server_on_three_devices_computes_in_what_it_prints(slots, context, micro, kv, layers, mib):
    shape = shape_of(gguf_spec(SMOLLM2, "Q4_1"))
    settings = llamacpp.Settings(
        sequences=slots, context_tokens=context, micro_batch_tokens=micro, kv_dtype=kv, gpu_layers=layers
    )
    loads, _ = llamacpp.on_cards(shape, settings, [llamacpp_law("rpc", 11434)] * 3, (0.4, 0.3, 0.3))
    for load, printed in zip(loads, mib, strict=True):
        assert load.compute_bytes / MIB == pytest.approx(printed, rel=0.005)
        assert printed <= load.compute_high_bytes / MIB


def test_layers_are_dealt_by_cumulative_share_and_the_head_goes_last():
    assert llamacpp.assign_layers(4, [1, 1]) == (0, 0, 0, 1, 1)
    assert llamacpp.assign_layers(4, [3, 1]) == (0, 0, 0, 0, 1)
    assert llamacpp.assign_layers(4, [1, 0, 1]) == (0, 0, 0, 2, 2)
    assert llamacpp.assign_layers(4, [1, 1], gpu_layers=3) == (-1, -1, 0, 0, 1)
    assert llamacpp.assign_layers(4, [1], gpu_layers=0) == (-1, -1, -1, -1, -1)


def test_layer_split_leaves_no_byte_behind_and_the_embedding_on_the_host():
    spec = gguf_spec(LLAMA2_70B, "F16")
    shape = shape_of(spec)
    settings = llamacpp.Settings(sequences=2, context_tokens=4096)
    loads, host_bytes = llamacpp.on_cards(shape, settings, [llamacpp_law("cuda", 11434)] * 3, [0.3, 0.5, 0.2])
    assert host_bytes == shape.embedding_bytes
    assert sum(load.weights_bytes for load in loads) + host_bytes == pytest.approx(spec.weights_bytes, abs=100_000)
    assert sum(load.kv_bytes for load in loads) == llamacpp.kv_bytes(shape, settings, range(80))


def test_tied_head_is_on_the_card_although_the_embedding_stays_on_the_host():
    shape = shape_of(gguf_spec(SMOLLM2, "Q8_0"))
    settings = llamacpp.Settings(sequences=1, context_tokens=512)
    (load,), host_bytes = llamacpp.on_cards(shape, settings, [llamacpp_law("cuda", 11434)], [1.0])
    assert host_bytes == shape.embedding_bytes
    assert load.weights_bytes > shape.layers_before_bytes[-1] + shape.embedding_bytes


def test_tensor_mode_keeps_a_whole_compute_buffer_on_every_card():
    shape = shape_of(gguf_spec(LLAMA2_70B, "Q8_0"))
    law = llamacpp_law("cuda", 11434)
    settings = llamacpp.Settings(sequences=1, context_tokens=4096, split_mode="tensor")
    loads, _ = llamacpp.on_cards(shape, settings, [law, law], [0.5, 0.5])
    alone = llamacpp.compute_bytes(shape, settings, law, outputs=1)
    assert [load.compute_bytes for load in loads] == [alone, alone]
    assert loads[0].kv_bytes == loads[1].kv_bytes == 640 * MIB


def test_unknown_build_takes_the_nearest_older_law_with_a_wider_band():
    spec = gguf_spec(LLAMA2_7B, "F16")
    group = Group(limits=Limits(sequences=1))
    known, unknown = (
        plan_group(spec, group, machine(h200()), model_name="m", engine_version=version)
        for version in ("b11434", "b12000")
    )
    assert unknown.cards[0].terms.compute_bytes == known.cards[0].terms.compute_bytes
    assert unknown.cards[0].total_high_bytes > known.cards[0].total_high_bytes
    assert any("unverified" in reason for reason in unknown.reasons)
    assert not any("unverified" in reason for reason in known.reasons)


def test_kv_type_that_does_not_divide_the_head_is_refused():
    odd = Dimensions(
        name="odd", layers=1, hidden_size=160, feed_forward_size=320, attention_heads=2, kv_heads=2, head_size=80
    )
    with pytest.raises(ConfigError, match="divides by 32, this model's is 80"):
        plan_group(gguf_spec(odd, "F16"), Group(limits=Limits(kv_dtype="q8_0")), machine(h200()), model_name="m")
