"""From a plan to vLLM's command line: options, their spellings in the installed version, threads of each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from llamarack.config import Group
from llamarack.engine.adaptor import LaunchContext
from llamarack.engine.command_line import Option, dashed, pass_engine_args, render_options

# What the deployment file models, by vLLM's option; naming one in engine_args would part plan and engine silently.
_MODELLED = {
    "model": "path",
    "tensor-parallel-size": "tensor_parallel",
    "tp": "tensor_parallel",  # argparse's short forms
    "pipeline-parallel-size": "pipeline_parallel",
    "pp": "pipeline_parallel",
    "gpu-memory-utilization": "limits.gpu_memory_fraction",
    "kv-cache-memory-bytes": "limits.kv_cache_bytes",
    "kv-cache-memory": "limits.kv_cache_bytes",
    "max-model-len": "limits.context_tokens",
    "max-num-seqs": "limits.sequences",
    "max-num-batched-tokens": "limits.batch_tokens",
    "kv-cache-dtype": "limits.kv_dtype",
    "served-model-name": "models[].name",
    "tokenizer": "models[].tokenizer",
    "chat-template": "models[].chat_template",
    "host": "the rack's own socket",
    "port": "the rack's own socket",
    "uds": "the rack's own socket",
    "api-key": "the rack's own key",
    "trust-remote-code": "nothing: code from model files is never run",
}
# Of the time the keeper gives between SIGTERM and SIGKILL; the supervisor has drained before.
_SHUTDOWN_TIMEOUT_S = 5
_LEAST_QUEUED = 32


def options_of(context: LaunchContext, template: Path | None) -> list[Option]:
    """What the plan asks for. `template`: a file with the chat template, None for the model's own."""
    plan, group, model = context.candidate, context.group, context.model

    def needed(name: str, value: object, *older: str) -> Option:
        return Option(names=(name, *older), value=str(value))

    options = [
        needed("model", context.path),
        needed("served-model-name", model.name),
        needed("tokenizer", model.tokenizer or context.path),
        needed("uds", context.socket),
        needed("tensor-parallel-size", plan.tensor_parallel),
        needed("pipeline-parallel-size", plan.pipeline_parallel),
        needed("max-model-len", plan.context_tokens),
        needed("max-num-seqs", plan.sequences),
        needed("max-num-batched-tokens", max(plan.batch_tokens, plan.sequences)),
        needed("kv-cache-dtype", _kv_dtype(plan.kv_dtype)),
    ]
    if (dtype := _dtype(plan.kv_dtype)) is not None and "dtype" not in _normalised(group.engine_args):
        options.append(needed("dtype", dtype))
    if context.card_uuids:
        fraction = plan.gpu_memory_fraction or group.limits.gpu_memory_fraction
        options.append(needed("gpu-memory-utilization", fraction))
    kv_cache_bytes = _kv_cache_bytes(context)
    if kv_cache_bytes is not None:
        options.append(needed("kv-cache-memory-bytes", kv_cache_bytes, "kv-cache-memory"))
    if template is not None:
        options.append(needed("chat-template", template))
    # The gateway never sends more than `sequences` at once; this bound is met only when it errs.
    queued = str(max(_LEAST_QUEUED, 2 * plan.sequences))
    return [
        *options,
        Option(names=("max-num-queued-reqs",), value=queued, needed=False),
        Option(names=("shutdown-timeout",), value=str(_SHUTDOWN_TIMEOUT_S), needed=False),
        Option(names=("disable-uvicorn-access-log", "disable-access-log"), value=None, needed=False),
        Option(names=("no-enable-log-requests", "disable-log-requests"), value=None, needed=False),
    ]


def _kv_cache_bytes(context: LaunchContext) -> int | None:
    """Written by the plan wins over the fraction; the processor has no fraction that could be planned."""
    asked = context.group.limits.kv_cache_bytes
    if asked != "auto":
        return asked
    return None if context.card_uuids else context.candidate.kv_cache_bytes


def _kv_dtype(kv_dtype: str) -> str:
    """The 16-bit forms follow the weights: attention kernels want both of one type."""
    return "auto" if kv_dtype in {"auto", "f16", "bf16"} else kv_dtype


def _dtype(kv_dtype: str) -> str | None:
    """FlashAttention 3 (Hopper) writes bfloat16 from an FP8 cache and ends a float16 model at its first step."""
    return "bfloat16" if kv_dtype == "bf16" or kv_dtype.startswith("fp8") else None


def render(options: Sequence[Option], known: frozenset[str], version: str) -> list[str]:
    """Arguments in the spelling of the installed version. Raises ConfigError for a needed option it lacks."""
    hint = "llamarack engine install vllm makes a version ready that has it"
    return render_options(options, known, program=f"vllm {version}", hint=hint)


def pass_through(group: Group, known: frozenset[str]) -> list[str]:
    """engine_args as they are. Raises ConfigError for one that the file models or that this version lacks."""
    return pass_engine_args(group.engine_args, known, _MODELLED, program="vllm")


def _normalised(engine_args: Mapping[str, object]) -> frozenset[str]:
    return frozenset(map(dashed, engine_args))


def thread_environment(ranks: int, threads: int) -> dict[str, str]:
    """Threads of each rank on the processor. vLLM's own binding wants a NUMA node per rank, and cores that are given to
    one model are taken by another just as well: the kernel spreads the threads instead."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, threads // ranks))}
