"""llama.cpp through the built-in worker: options from the plan, causes of death, metric names.

Verified against xllamacpp 2026.10.11549 (llama.cpp b11549).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from llamarack.config import Group
from llamarack.engine.adaptor import (
    Counters,
    Deviations,
    Diagnosis,
    Endpoint,
    FatalLine,
    Launch,
    LaunchContext,
    MetricNames,
    engine_environment,
    read_counters,
)
from llamarack.engine.chat_template import is_known, template_text
from llamarack.engine.device_memory import DeviceTerms
from llamarack.errors import ConfigError, HardwareError
from llamarack.units import MIB

KEY_VARIABLE = "LLAMARACK_ENGINE_KEY"
_DEVICE_PROBE_TIMEOUT_S = 60.0
_CUDA_INDEX = "https://xorbitsai.github.io/xllamacpp/whl/cu128"  # the vendor's own wheels
_WORKER = Path(__file__).with_name("llamacpp_worker.py")  # imports nothing of ours, so it runs as a plain file

# What the deployment file models, by the option's name in the worker; naming one in engine_args would part plan and
# engine silently.
_MODELLED = {
    "model": "path",
    "model.path": "path",
    "model_alias": "models[].name",
    "n_ctx": "limits.context_tokens and limits.sequences",
    "n_parallel": "limits.sequences",
    "n_batch": "limits.batch_tokens",
    "n_ubatch": "limits.batch_tokens",
    "cache_type_k": "limits.kv_dtype",
    "cache_type_v": "limits.kv_dtype",
    "kv_unified": "limits.kv_unified",
    "n_gpu_layers": "gpu_layers",
    "split_mode": "split_mode",
    "tensor_split": "tensor_split",
    "main_gpu": "main_gpu",
    "cpuparams.n_threads": "limits.threads",
    "cpuparams_batch.n_threads": "limits.threads",
    "chat_template": "models[].chat_template",
    "hostnames": "the rack's own socket",
    "port": "the rack's own socket",
    "api_keys": "the rack's own key",
    "fit_params": "the plan",
}

_FATAL = (
    FatalLine(
        # Pinned host memory that is refused is only slower; the library goes on.
        pattern=r"^(?!.*pinned memory).*(out of memory|failed to allocate|unable to allocate|cudaMalloc failed)",
        cause="out_of_memory",
        message="the engine could not get the memory it asked for",
        hint="lower limits.sequences or limits.context_tokens, or use a coarser quantisation; see llamarack plan FILE",
    ),
    FatalLine(
        pattern=r"(data is not within the file bounds|corrupted or incomplete|invalid magic|failed to read)",
        cause="model_file_damaged",
        message="the model file is damaged or incomplete",
        hint="compare its size and SHA-256 with the source and copy it again",
    ),
    FatalLine(
        pattern=r"unknown model architecture: '([^']+)'",
        cause="unsupported_architecture",
        message="this llama.cpp does not know the model's architecture",
        hint="install a newer engine: llamarack engine install llamacpp",
    ),
    FatalLine(
        pattern=r"couldn't bind HTTP server socket",
        cause="socket_in_use",
        message="the engine could not listen on its socket",
        hint="look who holds it: ss -lxp | grep llamarack",
    ),
    FatalLine(
        pattern=r"llamarack worker: (.*)",
        cause="bad_option",
        message="{0}",
        hint="correct engine_args in the deployment file",
    ),
    FatalLine(
        pattern=r"(error loading model|failed to load model)",
        cause="load_failed",
        message="the engine could not load the model",
    ),
)

# `load_tensors:   CPU_Mapped model buffer size =    92.10 MiB`, at verbosity 4.
_BUFFER = re.compile(r"(\S+) +(model|KV|compute) buffer size = +([\d.]+) MiB")
_BUFFER_TERMS = {"model": "weights_bytes", "KV": "kv_bytes", "compute": "compute_bytes"}


class LlamaCpp:
    name = "llamacpp"
    # The worker's own keep-alives are off; an error inside a stream comes as `error: {...}` or as a data event.
    deviations = Deviations()

    def prepare(self, group: Group, *, on_cards: bool) -> None:
        _refuse_modelled(group)
        if group.engine_binary is not None:
            raise ConfigError(
                f"`engine_binary`: `{group.engine_binary}` is not run: this version has the built-in worker only",
                hint="leave engine_binary out",
            )
        if group.rpc_servers:
            raise ConfigError(
                "`rpc_servers`: this version does not use RPC devices",
                hint="leave rpc_servers out, or type rpc_servers: []",
            )
        if on_cards and not _has_gpu_device():
            raise HardwareError(
                "this machine has cards, but the installed llama.cpp (xllamacpp) was built without a GPU device",
                hint=f"{sys.executable} -m pip install --force-reinstall xllamacpp --index-url {_CUDA_INDEX}, "
                "or gpus: [] to run on the processor",
            )

    def launch(self, context: LaunchContext) -> Launch:
        options = worker_options(context)
        path = context.files / "llamacpp.json"
        path.write_text(json.dumps(options, indent=1))
        return Launch(
            argv=[sys.executable, "-P", str(_WORKER), str(path)],
            env=engine_environment(os.environ, context.card_uuids, {**context.group.env, KEY_VARIABLE: context.key}),
            endpoint=Endpoint(socket=context.socket, port=None, key=context.key, served_name=context.model.name),
        )

    def diagnose(self, exit_words: str, log_tail: Sequence[str]) -> Diagnosis:
        return diagnose_by_lines(_FATAL, exit_words, log_tail)

    def load_fraction(self, log_tail: Sequence[str]) -> float | None:
        return None  # the library reports progress as dots without a total

    def device_terms(self, log_lines: Sequence[str]) -> Sequence[DeviceTerms]:
        return buffers(log_lines)

    def counters(self, metrics_text: str) -> Counters:
        return read_counters(
            metrics_text,
            MetricNames(
                generated_tokens=("llamacpp:tokens_predicted_total",),
                prompt_tokens=("llamacpp:prompt_tokens_total",),
                running=("llamacpp:requests_processing",),
                waiting=("llamacpp:requests_deferred",),
                steps=("llamacpp:n_decode_total",),
            ),
        )


def buffers(log_lines: Iterable[str]) -> list[DeviceTerms]:
    """Buffers by device, in the order of the log: cards where there are any, else the processor. In tensor mode the
    sizes are the largest of all cards' (`Meta`) and say nothing of one."""
    sizes: dict[str, dict[str, int]] = {}
    for line in log_lines:
        match = _BUFFER.search(line)
        if match is None or match[1].startswith("Meta"):
            continue
        device = "CPU" if match[1].startswith("CPU") else match[1]
        terms = sizes.setdefault(device, {})
        term = _BUFFER_TERMS[match[2]]
        terms[term] = terms.get(term, 0) + round(float(match[3]) * MIB)
    cards = [DeviceTerms(device=name, terms=terms) for name, terms in sizes.items() if not _is_host(name)]
    return cards or [DeviceTerms(device=name, terms=terms) for name, terms in sizes.items() if name == "CPU"]


def _is_host(device: str) -> bool:
    return device == "CPU" or device.endswith("_Host")


def _has_gpu_device() -> bool:
    """Whether the installed library sees one, asked in a child: loading it here would cost 100 MB."""
    code = "import xllamacpp; print([str(d['type']) for d in xllamacpp.get_device_info()])"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_DEVICE_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise HardwareError(
            f"llama.cpp did not list its devices within {_DEVICE_PROBE_TIMEOUT_S:.0f} s",
            hint="llamarack check tells whether the driver answers",
        ) from None
    return "GPU" in done.stdout


def worker_options(context: LaunchContext) -> dict[str, object]:
    """Names and values of the worker's parameter object, from the plan; engine_args come last.

    Raises ConfigError for an engine_args name that the file models.
    """
    plan = context.candidate
    limits = context.group.limits
    _refuse_modelled(context.group)
    options: dict[str, object] = {
        "model.path": str(context.path),
        "model_alias": [context.model.name],
        "hostnames": [str(context.socket)],
        "n_ctx": plan.context_tokens * plan.sequences if not plan.kv_unified else plan.context_tokens,
        "n_parallel": plan.sequences,
        "n_batch": plan.batch_tokens,
        "n_ubatch": plan.micro_batch_tokens or min(512, plan.batch_tokens),
        "cache_type_k": plan.kv_dtype,
        "cache_type_v": plan.kv_dtype,
        "kv_unified": limits.kv_unified,
        "fit_params": False,  # the plan fits; the engine must not change it
        "endpoint_metrics": True,
        "endpoint_slots": True,
        "ui": False,
        "verbosity": 4,  # buffer sizes are printed from this level on (PR #23021)
        "cache_ram_mib": 0,  # a prompt cache of up to 8 GiB of RAM would stand outside every plan
        "sse_ping_interval": -1,  # the gateway sends its own
        "cors_origins": "http://127.0.0.1:1",  # browsers are served by the gateway alone
    }
    if plan.threads is not None:
        options["cpuparams.n_threads"] = plan.threads
        options["cpuparams_batch.n_threads"] = plan.threads
    if not context.card_uuids:
        options["n_gpu_layers"] = 0
    else:
        options["n_gpu_layers"] = 999 if context.group.gpu_layers == "all" else context.group.gpu_layers
        options["split_mode"] = context.group.split_mode
        options["main_gpu"] = context.group.main_gpu
        if plan.tensor_split is not None:
            options["tensor_split"] = list(plan.tensor_split)
    if context.model.chat_template is not None:
        options["chat_template"] = _template_text(context.model.chat_template)
    return {**options, **context.group.engine_args}


def _refuse_modelled(group: Group) -> None:
    for name in group.engine_args:
        if name in _MODELLED:
            raise ConfigError(
                f"engine_args.{name}: the deployment file models this", hint=f"set {_MODELLED[name]} instead"
            )


def _template_text(given: str) -> str:
    """Ours by name or a file; other names are llama.cpp's own."""
    return template_text(given) if is_known(given) or Path(given).is_file() else given


def diagnose_by_lines(known: Sequence[FatalLine], exit_words: str, log_tail: Sequence[str]) -> Diagnosis:
    """The first known cause, tried in order of `known`, each against the newest lines first."""
    for fatal in known:
        for line in reversed(log_tail):
            match = re.search(fatal.pattern, line, re.IGNORECASE)
            if match:
                return Diagnosis(cause=fatal.cause, message=fatal.message.format(*match.groups()), hint=fatal.hint)
    return Diagnosis(
        cause="unrecognised", message=f"the engine ended: {exit_words}; no known cause in its log", hint=None
    )
