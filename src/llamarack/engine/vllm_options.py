"""From a plan to vLLM's command line: options, their spellings in the installed version, threads of each rank. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.config import Group
from llamarack.engine.adaptor import LaunchContext
from llamarack.errors import ConfigError

# What the deployment file models, by vLLM's option; naming one in engine_args would part plan and engine silently.
_MODELLED = {
    "model": "path",
    "tensor-parallel-size": "tensor_parallel",
    "pipeline-parallel-size": "pipeline_parallel",
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
# argparse's short forms of the above.
_SHORT = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size"}
# Of the time the keeper gives between SIGTERM and SIGKILL; the supervisor has drained before.
_SHUTDOWN_TIMEOUT_S = 5
_FLAG = re.compile(r"(?<![\w-])--([a-z0-9][a-z0-9_.-]*[a-z0-9])")
_LEAST_QUEUED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """`names`: spellings, newest first. `value` None: a switch. `needed`: a version that lacks it cannot be used."""

    names: tuple[str, ...]
    value: str | None
    needed: bool = True


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


def flags_of(help_text: str) -> frozenset[str]:
    """Long options that a help text names, without their dashes, in the dashed spelling."""
    return frozenset(name.replace("_", "-") for name in _FLAG.findall(help_text))


def render(options: Sequence[Option], known: frozenset[str], version: str) -> list[str]:
    """Arguments in the spelling of the installed version. Raises ConfigError for a needed option it lacks."""
    arguments: list[str] = []
    for option in options:
        name = next((name for name in option.names if name in known), None)
        if name is None:
            if option.needed:
                raise ConfigError(
                    f"vllm {version} has no option `--{option.names[0]}`",
                    hint="llamarack engine install vllm makes a version ready that has it",
                )
            continue
        arguments += [f"--{name}"] if option.value is None else [f"--{name}", option.value]
    return arguments


def pass_through(group: Group, known: frozenset[str]) -> list[str]:
    """engine_args as they are. Raises ConfigError for one that the file models or that this version lacks."""
    arguments: list[str] = []
    for given, value in group.engine_args.items():
        name = _dashed(given)
        modelled = _MODELLED.get(_SHORT.get(name, name))
        if modelled is not None:
            raise ConfigError(f"engine_args.{given}: the deployment file models this", hint=f"set {modelled} instead")
        if name not in known and name.partition(".")[0] not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            raise ConfigError(
                f"engine_args.{given} is no option of this vllm",
                hint=f"near: {close[0]}" if close else "engine_args takes vLLM's own names, without the dashes",
            )
        arguments += _argument(given, name, value, known)
    return arguments


def _argument(given: str, name: str, value: str | int | float | bool | None, known: frozenset[str]) -> list[str]:
    if value is None or value is True:
        return [f"--{name}"]
    if value is not False:
        return [f"--{name}", str(value)]
    if f"no-{name}" not in known:
        raise ConfigError(f"engine_args.{given}: this option cannot be switched off", hint="leave it out")
    return [f"--no-{name}"]


def _normalised(engine_args: Mapping[str, object]) -> frozenset[str]:
    return frozenset(map(_dashed, engine_args))


def _dashed(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def thread_environment(ranks: int, threads: int) -> dict[str, str]:
    """Threads of each rank on the processor. vLLM's own binding wants a NUMA node per rank, and cores that are given to
    one model are taken by another just as well: the kernel spreads the threads instead."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, threads // ranks))}
