"""llama.cpp's memory against figures that the engine itself printed."""

import csv
from importlib.resources import files

import pytest

from llamarack.plan import llamacpp
from llamarack.plan.engine_data import llamacpp_law
from llamarack.plan.reference import Dimensions, gguf_spec
from llamarack.plan.shape import shape_of
from llamarack.units import MIB
from tests.plan.shapes import LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, LLAMA3_8B

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
        (load,), host_bytes = llamacpp.on_cards(shape, settings, law, [1.0])
        printed = {key: int(row[key]) for key in ("model_mib", "context_mib", "compute_mib", "host_model_mib")}
        planned = {
            "model_mib": load.weights_bytes // MIB,
            "context_mib": load.kv_bytes // MIB,
            "compute_mib": load.compute_high_bytes // MIB,
            "host_model_mib": host_bytes // MIB,
        }
        assert planned == printed, row
