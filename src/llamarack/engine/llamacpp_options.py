"""What the plan asks of a llama.cpp server: one record, rendered for the built-in worker or for a llama-server. Pure.

Flags: llama-server b11434 (common/arg.cpp); `known` are those that the binary at hand names in its help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamarack.config import Group
from llamarack.engine.adaptor import LaunchContext
from llamarack.engine.chat_template import is_known, template_text
from llamarack.engine.command_line import EngineArgs, Option, pass_engine_args, render_options
from llamarack.errors import ConfigError

_ALL_LAYERS = 999
_MICRO_BATCH_TOKENS = 512
_NO_ORIGIN = "http://127.0.0.1:1"  # browsers are served by the gateway alone
_LOG_VERBOSITY = 4  # buffer sizes are printed from this level on (PR #23021)

# What the deployment file models, by the option's name in the worker; naming one in engine_args would part plan and
# engine silently.
_WORKER_MODELLED = {
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
# The same by llama-server's long options and their other spellings.
_BINARY_MODELLED = {
    "model": "path",
    "hf-repo": "path",
    "model-url": "path",
    "docker-repo": "path",
    "alias": "models[].name",
    "ctx-size": "limits.context_tokens and limits.sequences",
    "parallel": "limits.sequences",
    "batch-size": "limits.batch_tokens",
    "ubatch-size": "limits.batch_tokens",
    "cache-type-k": "limits.kv_dtype",
    "cache-type-v": "limits.kv_dtype",
    "kv-unified": "limits.kv_unified",
    "gpu-layers": "gpu_layers",
    "n-gpu-layers": "gpu_layers",
    "split-mode": "split_mode",
    "tensor-split": "tensor_split",
    "main-gpu": "main_gpu",
    "device": "gpus and rpc_servers",
    "rpc": "rpc_servers",
    "threads": "limits.threads",
    "threads-batch": "limits.threads",
    "chat-template": "models[].chat_template",
    "chat-template-file": "models[].chat_template",
    "host": "the rack's own socket",
    "port": "the rack's own socket",
    "api-key": "the rack's own key",
    "api-key-file": "the rack's own key",
    "fit": "the plan",
    "fit-ctx": "the plan",
    "fit-target": "the plan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """`pool_tokens`: KV cells of all slots together. `gpu_layers` 0: the processor alone.

    `devices_named`: there are cards or RPC devices; without them nothing about splits is said.
    `template`: Jinja text or llama.cpp's own name for a template.
    """

    model_path: Path
    name: str
    socket: Path
    pool_tokens: int
    sequences: int
    batch_tokens: int
    micro_batch_tokens: int
    kv_dtype: str
    kv_unified: bool
    threads: int | None
    gpu_layers: int
    devices_named: bool
    split_mode: str
    main_gpu: int
    tensor_split: tuple[float, ...] | None
    rpc_servers: tuple[str, ...]
    template: str | None


def server_options(context: LaunchContext) -> ServerOptions:
    plan, group = context.candidate, context.group
    has_devices = bool(context.card_uuids) or bool(group.rpc_servers)
    wanted = _ALL_LAYERS if group.gpu_layers == "all" else group.gpu_layers
    template = context.model.chat_template
    return ServerOptions(
        model_path=context.path,
        name=context.model.name,
        socket=context.socket,
        pool_tokens=plan.context_tokens * (1 if plan.kv_unified else plan.sequences),
        sequences=plan.sequences,
        batch_tokens=plan.batch_tokens,
        micro_batch_tokens=plan.micro_batch_tokens or min(_MICRO_BATCH_TOKENS, plan.batch_tokens),
        kv_dtype=plan.kv_dtype,
        kv_unified=group.limits.kv_unified,
        threads=plan.threads,
        gpu_layers=wanted if has_devices else 0,
        devices_named=has_devices,
        split_mode=group.split_mode,
        main_gpu=group.main_gpu,
        tensor_split=plan.tensor_split,
        rpc_servers=tuple(address.endpoint for address in group.rpc_addresses()),
        template=None if template is None else _template_text(template),
    )


def _template_text(given: str) -> str:
    """Ours by name or a file; other names are llama.cpp's own."""
    return template_text(given) if is_known(given) or Path(given).is_file() else given


def worker_parameters(options: ServerOptions, engine_args: EngineArgs) -> dict[str, object]:
    """Names and values of the worker's parameter object; engine_args come last."""
    parameters: dict[str, object] = {
        "model.path": str(options.model_path),
        "model_alias": [options.name],
        "hostnames": [str(options.socket)],
        "n_ctx": options.pool_tokens,
        "n_parallel": options.sequences,
        "n_batch": options.batch_tokens,
        "n_ubatch": options.micro_batch_tokens,
        "cache_type_k": options.kv_dtype,
        "cache_type_v": options.kv_dtype,
        "kv_unified": options.kv_unified,
        "fit_params": False,  # the plan fits; the engine must not change it
        "endpoint_metrics": True,
        "endpoint_slots": True,
        "ui": False,
        "verbosity": _LOG_VERBOSITY,
        "cache_ram_mib": 0,  # a prompt cache of up to 8 GiB of RAM would stand outside every plan
        "sse_ping_interval": -1,  # the gateway sends its own
        "cors_origins": _NO_ORIGIN,
        "n_gpu_layers": options.gpu_layers,
    }
    if options.threads is not None:
        parameters["cpuparams.n_threads"] = options.threads
        parameters["cpuparams_batch.n_threads"] = options.threads
    if options.devices_named:
        parameters["split_mode"] = options.split_mode
        parameters["main_gpu"] = options.main_gpu
        if options.tensor_split is not None:
            parameters["tensor_split"] = list(options.tensor_split)
    else:
        parameters["warmup"] = False  # its own run of nothing: the supervisor's first tokens do the same
    if options.template is not None:
        parameters["chat_template"] = options.template
    return {**parameters, **engine_args}


def refuse_worker_modelled(group: Group) -> None:
    """Raises ConfigError for an engine_args name that the file models."""
    for name in group.engine_args:
        if name in _WORKER_MODELLED:
            raise ConfigError(
                f"engine_args.{name}: the deployment file models this", hint=f"set {_WORKER_MODELLED[name]} instead"
            )


def binary_arguments(
    options: ServerOptions, known: frozenset[str], *, program: str, template_file: Path | None
) -> list[str]:
    """llama-server's arguments, without the key: that comes in its environment.

    `template_file`: holds `options.template` where that is Jinja text. Raises ConfigError for an option that this
    version lacks.
    """

    def needed(name: str, value: object, *older: str) -> Option:
        return Option(names=(name, *older), value=str(value))

    def wanted(name: str, value: str | None, *older: str) -> Option:
        return Option(names=(name, *older), value=value, needed=False)

    asked = [
        needed("model", options.model_path),
        needed("alias", options.name),
        needed("host", options.socket),  # a name that ends in .sock is a Unix socket
        needed("ctx-size", options.pool_tokens),
        needed("parallel", options.sequences),
        needed("batch-size", options.batch_tokens),
        needed("ubatch-size", options.micro_batch_tokens),
        needed("cache-type-k", options.kv_dtype),
        needed("cache-type-v", options.kv_dtype),
        # Before --kv-unified existed, split caches were the only ones.
        Option(names=("kv-unified",), value=None) if options.kv_unified else wanted("no-kv-unified", None),
        wanted("fit", "off"),  # the plan fits; a version without the option changes nothing by itself
        Option(names=("metrics",), value=None),
        Option(names=("slots",), value=None),
        wanted("no-ui", None, "no-webui"),
        needed("log-verbosity", _LOG_VERBOSITY, "verbosity"),
        wanted("cache-ram", "0"),  # a prompt cache of up to 8 GiB of RAM would stand outside every plan
        wanted("sse-ping-interval", "-1"),  # the gateway sends its own
        wanted("cors-origins", _NO_ORIGIN),
        wanted("offline", None),
        needed("gpu-layers", options.gpu_layers, "n-gpu-layers"),
    ]
    if options.threads is not None:
        asked += [needed("threads", options.threads), needed("threads-batch", options.threads)]
    if options.rpc_servers:
        asked.append(needed("rpc", ",".join(options.rpc_servers)))
    if options.devices_named:
        asked.append(needed("split-mode", options.split_mode))
        asked.append(needed("main-gpu", options.main_gpu))
        if options.tensor_split is not None:
            asked.append(needed("tensor-split", ",".join(f"{share:g}" for share in options.tensor_split)))
    else:
        asked += [wanted("device", "none"), wanted("no-warmup", None)]
    if template_file is not None:
        asked.append(needed("chat-template-file", template_file))
    elif options.template is not None:
        asked.append(needed("chat-template", options.template))
    hint = "llamarack engine install llamacpp makes a version ready that has it"
    return render_options(asked, known, program=program, hint=hint)


def binary_engine_args(engine_args: EngineArgs, known: frozenset[str]) -> list[str]:
    """engine_args as llama-server's own long options. Raises ConfigError as `pass_engine_args` does."""
    return pass_engine_args(engine_args, known, _BINARY_MODELLED, program="llama-server")


def is_jinja(template: str) -> bool:
    return "{{" in template or "{%" in template


def engine_args_are_flags(engine_args: Mapping[str, object], known: frozenset[str]) -> bool:
    """Whether a llama-server knows them all; names of the worker's parameter object are spelled differently."""
    return all(name.lstrip("-").replace("_", "-") in known for name in engine_args)
