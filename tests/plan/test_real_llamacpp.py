"""The CPU law against the library itself, on models made here: other shapes than the law was read from."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llamarack.plan import llamacpp
from llamarack.plan.engine_data import llamacpp_law
from llamarack.plan.reference import Dimensions, gguf_spec
from llamarack.plan.shape import shape_of
from llamarack.units import MIB
from tests.plan.files import sparse_gguf

pytestmark = pytest.mark.llamacpp

_LOAD = """
import json, sys
import xllamacpp as x
asked = json.loads(sys.argv[1])
p = x.CommonParams()
p.model.path = asked["path"]
p.n_ctx, p.n_parallel, p.n_ubatch, p.n_batch = asked["n_ctx"], asked["slots"], asked["micro"], 2048
p.cache_type_k = p.cache_type_v = getattr(x.ggml_type, "GGML_TYPE_" + asked["kv"].upper())
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
p.kv_unified, p.fit_params, p.warmup, p.verbosity = asked["unified"], False, False, 4
p.hostnames, p.cpuparams.n_threads = [asked["socket"]], 1
server = x.Server(p)
sys.stdin.read()
"""

WIDE = Dimensions(
    name="wide", layers=2, hidden_size=256, feed_forward_size=1024, attention_heads=4, kv_heads=1, head_size=64,
    vocab_size=2048,
)  # fmt: skip
TALL = Dimensions(
    name="tall", layers=5, hidden_size=128, feed_forward_size=384, attention_heads=4, kv_heads=4, head_size=32,
    vocab_size=8192, tied_embeddings=True,
)  # fmt: skip


def _log_of(asked: dict[str, object]) -> str:
    """Up to its last line of a start: a thread of its own writes it, and the end of the process cuts it off."""
    command = [sys.executable, "-c", _LOAD, json.dumps(asked)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stop = threading.Timer(60, process.kill)
        stop.start()
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "listening on" in line:
                break
        stop.cancel()
        process.kill()
    return "".join(lines)


@pytest.mark.parametrize(
    ("size", "label", "context", "slots", "micro", "kv", "unified"),
    [
        (WIDE, "F16", 4096, 1, 512, "f16", False),
        (WIDE, "Q8_0", 1000, 3, 128, "q8_0", False),
        (TALL, "Q4_0", 512, 32, 64, "f16", False),
        (TALL, "F16", 1024, 8, 256, "q4_0", True),
    ],
)
def test_buffers_are_what_the_library_prints(tmp_path: Path, size, label, context, slots, micro, kv, unified):
    path = sparse_gguf(tmp_path / "m.gguf", size, label)
    settings = llamacpp.Settings(
        sequences=slots, context_tokens=context, micro_batch_tokens=micro, kv_dtype=kv, kv_unified=unified
    )
    asked = {
        "path": str(path), "n_ctx": settings.total_cells, "slots": slots, "micro": micro, "kv": kv,
        "unified": unified, "socket": str(tmp_path / "s.sock"),
    }  # fmt: skip
    told = _log_of(asked)
    printed: dict[str, float] = {}
    for kind, mib in re.findall(r"(model|KV|output|compute)\s+buffer size\s*=\s*([\d.]+) MiB", told):
        printed[kind] = printed.get(kind, 0.0) + float(mib)
    assert {*printed} == {"model", "KV", "output", "compute"}, told[-2000:]
    load = llamacpp.on_cpu(shape_of(gguf_spec(size, label)), settings, llamacpp_law("cpu", 11549))
    assert load.kv_bytes / MIB == pytest.approx(printed["KV"], abs=0.01)
    assert load.weights_bytes / MIB == pytest.approx(printed["model"], abs=0.02)
    compute = printed["compute"] + printed["output"]
    assert compute - 0.02 <= load.compute_bytes / MIB <= 1.02 * compute + 0.1
