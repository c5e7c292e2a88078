"""llama.cpp through the built-in worker or a llama-server: which one, how it is launched, causes of death, metrics.

Verified against xllamacpp 2026.10.11549 (llama.cpp b11549) and llama-server b11434.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llamarack.config import Group
from llamarack.engine.adaptor import Diagnosis, FatalLine, Launch, LaunchContext
from llamarack.engine.device_memory import DeviceTerms
from llamarack.engine.dialect import Endpoint
from llamarack.engine.dialects import LlamaCppDialect
from llamarack.engine.installed import Installed, installed_engines
from llamarack.engine.llamacpp_binary import Binary, ask_binary, devices_of
from llamarack.engine.llamacpp_log import buffers, features_of, require_layers
from llamarack.engine.llamacpp_options import (
    ServerOptions,
    binary_arguments,
    binary_engine_args,
    engine_args_are_flags,
    is_jinja,
    refuse_worker_modelled,
    server_options,
    worker_parameters,
)
from llamarack.environment import ENGINE_KEY, engine_environment
from llamarack.errors import ConfigError, HardwareError
from llamarack.plan.record import Candidate

KEY_VARIABLE = ENGINE_KEY
BINARY_KEY_VARIABLE = "LLAMA_API_KEY"  # llama-server's own
_DEVICE_PROBE_TIMEOUT_S = 60.0
_CUDA_INDEX = "https://xorbitsai.github.io/xllamacpp/whl/cu128"  # the vendor's own wheels
_WORKER_UP = "worker: listening on"
_WORKER = Path(__file__).with_name("llamacpp_worker.py")  # imports nothing of ours, so it runs as a plain file

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
        pattern=r"Failed to connect to (\S+)",
        cause="rpc_server_unreachable",
        message="the RPC server {0} cannot be reached",
        hint="start it there: ggml-rpc-server --host ADDRESS --port PORT; one client at a time is served",
    ),
    FatalLine(
        pattern=r"(Remote RPC server crashed|RPC server version mismatch)",
        cause="rpc_server_lost",
        message="an RPC server broke off or speaks another version: {0}",
        hint="read that server's own output; engine and RPC servers must be of one llama.cpp build",
    ),
    FatalLine(
        pattern=r"(error loading model|failed to load model)",
        cause="load_failed",
        message="the engine could not load the model",
    ),
)


class LlamaCpp(LlamaCppDialect):
    def prepare(self, group: Group, *, on_cards: bool) -> None:
        binary = binary_of(group, on_cards=on_cards)
        if binary is None:
            refuse_worker_modelled(group)
            if on_cards and not _has_gpu_device():
                raise HardwareError(
                    "this machine has cards, but the installed llama.cpp (xllamacpp) was built without a GPU device",
                    hint=f"llamarack engine install llamacpp --cuda, or {sys.executable} -m pip install "
                    f"--force-reinstall xllamacpp --index-url {_CUDA_INDEX}, or gpus: [] to run on the processor",
                )
            return
        binary_engine_args(group.engine_args, binary.flags)
        if on_cards and not any(not device.is_rpc for device in devices_of(binary)):
            raise HardwareError(
                f"this machine has cards, but `{binary.path}` was built without a GPU device",
                hint="llamarack engine install llamacpp --cuda builds one, or gpus: [] to run on the processor",
            )

    def launch(self, context: LaunchContext) -> Launch:
        options = server_options(context)
        binary = binary_of(context.group, on_cards=bool(context.card_uuids))
        if binary is None:
            refuse_worker_modelled(context.group)
            path = context.files / "llamacpp.json"
            path.write_text(json.dumps(worker_parameters(options, context.group.engine_args), indent=1))
            argv, key_variable = [sys.executable, "-P", str(_WORKER), str(path)], KEY_VARIABLE
        else:
            arguments = binary_arguments(
                options, binary.flags, program=binary.shown, template_file=_template_file(context, options)
            )
            own = binary_engine_args(context.group.engine_args, binary.flags)
            argv, key_variable = [str(binary.path), *arguments, *own], BINARY_KEY_VARIABLE
        return Launch(
            argv=argv,
            env=engine_environment(os.environ, context.card_uuids, {**context.group.env, key_variable: context.key}),
            endpoint=Endpoint(socket=context.socket, port=None, key=context.key, served_name=context.model.name),
            up_mark=_WORKER_UP if binary is None else None,
        )

    def diagnose(self, exit_words: str, log_tail: Sequence[str]) -> Diagnosis:
        return diagnose_by_lines(_FATAL, exit_words, log_tail)

    def load_fraction(self, log_tail: Sequence[str]) -> float | None:
        return None  # the library reports progress as dots without a total

    def device_terms(self, log_lines: Sequence[str]) -> Sequence[DeviceTerms]:
        return buffers(log_lines)

    def require_planned(self, candidate: Candidate, group: Group, log_lines: Sequence[str]) -> None:
        require_layers(candidate, group, log_lines)

    def build(self, group: Group, *, on_cards: bool) -> str | None:
        binary = binary_of(group, on_cards=on_cards)
        return None if binary is None or binary.build is None else f"b{binary.build}"


def binary_of(group: Group, *, on_cards: bool, known: Sequence[Installed] | None = None) -> Binary | None:
    """The llama-server that runs a group: the one it names, else an installed build for its devices; None: the
    built-in worker.

    Raises ConfigError for a file that is no llama-server, and for `rpc_servers` where no build with RPC is there.
    """
    if group.engine_binary is not None:
        binary = ask_binary(group.engine_binary)
        if group.rpc_servers and not binary.has_rpc:
            raise ConfigError(
                f"rpc_servers: `{binary.path}` was built without RPC", hint="llamarack engine install llamacpp --rpc"
            )
        return binary
    build = installed_build(group, on_cards=on_cards, known=installed_engines() if known is None else known)
    if build is None and group.rpc_servers:
        raise ConfigError(
            "rpc_servers: the built-in worker has no RPC, and no build that has it is installed",
            hint="llamarack engine install llamacpp --rpc, or engine_binary: /path/to/llama-server",
        )
    return None if build is None or build.binary is None else ask_binary(build.binary)


def installed_build(group: Group, *, on_cards: bool, known: Sequence[Installed]) -> Installed | None:
    """The newest installed build for the group's devices. One made for cards is left alone on the processor, where it
    has no advantage; one whose options are spelled differently from the file's engine_args as well."""
    for one in known:
        if one.engine != "llamacpp" or one.binary is None or (one.cuda is not None) is not on_cards:
            continue
        if group.rpc_servers and "rpc" not in one.features:
            continue
        if group.engine_args and not engine_args_are_flags(group.engine_args, ask_binary(one.binary).flags):
            continue
        return one
    return None


def _template_file(context: LaunchContext, options: ServerOptions) -> Path | None:
    if options.template is None or not is_jinja(options.template):
        return None
    path = context.files / "chat_template.jinja"
    path.write_text(options.template, encoding="utf-8")
    return path


def builtin_instruction_sets() -> tuple[str, ...]:
    """Those that the installed library was built for, as it says itself."""
    return features_of(_ask_builtin("print(xllamacpp.get_system_info())"))


def _has_gpu_device() -> bool:
    """Whether the installed library sees one."""
    return "GPU" in _ask_builtin("print([str(d['type']) for d in xllamacpp.get_device_info()])")


def _ask_builtin(code: str) -> str:
    """Asked in a child: loading the library here would cost 100 MB."""
    code = f"import xllamacpp; {code}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_DEVICE_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise HardwareError(
            f"llama.cpp did not list its devices within {_DEVICE_PROBE_TIMEOUT_S:.0f} s",
            hint="llamarack check tells whether the driver answers",
        ) from None
    return done.stdout


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
