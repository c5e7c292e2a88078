"""From a path to a loaded model: checks, the machine's load lock, the library's parameters."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil

from llamarack.embed.model import Model
from llamarack.errors import DoesNotFit, StartFailed, UsageError
from llamarack.hardware.loadlock import LoadLock
from llamarack.model.read import read_model
from llamarack.model.spec import ModelFormat, ModelSpec
from llamarack.units import format_bytes

CONTEXT_STEP_TOKENS = 256  # llama.cpp pads a sequence's cells to this (b11434)
MAX_CONTEXTS = 256  # LLAMA_MAX_SEQ of llama.cpp b11434
_CACHE_ELEMENT_BYTES = 2  # f16, the library's default for K and V
_SOCKET_PATH_MAX_BYTES = 100  # of the 108 that sockaddr_un has


def open(
    path: str | Path,
    *,
    contexts: int = 4,
    context_tokens: int = 2048,
    threads: int | None = None,
    gpu_layers: int | None = None,
    chat_template: str | None = None,
    load_timeout_s: float = 3600.0,
    verbosity: int = 0,
) -> Model:
    """Loads a GGUF file and returns when it answers.

    `context_tokens`: one context, prompt and output together. `threads`: default, the cores this process may use.
    `gpu_layers`: default, all that the library's devices take. `load_timeout_s`: how long to wait for other loads.
    `verbosity`: 4 prints the library's log on stderr.

    Raises ModelError, UsageError, DoesNotFit, NeverReady (other loads took too long), StartFailed.
    """
    spec = read_model(Path(path))
    _check_options(spec, contexts, context_tokens)
    context_tokens = -(-context_tokens // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS
    with LoadLock(timeout_s=load_timeout_s):
        _check_memory(spec, contexts * context_tokens)
        server = _load(spec, contexts, context_tokens, threads, gpu_layers, chat_template, verbosity)
    return Model(spec, server, contexts, context_tokens)


def _check_options(spec: ModelSpec, contexts: int, context_tokens: int) -> None:
    if spec.format != ModelFormat.GGUF:
        raise UsageError(f"`{spec.path}` is {spec.format}; in process only GGUF runs", hint="name a GGUF file of it")
    if not 1 <= contexts <= MAX_CONTEXTS:
        raise UsageError(f"contexts is {contexts}, not 1 to {MAX_CONTEXTS}", hint="give contexts=4")
    if not 1 <= context_tokens <= 2**24:
        raise UsageError(f"context_tokens is {context_tokens}, not 1 to {2**24:,}", hint="give context_tokens=2048")


def _check_memory(spec: ModelSpec, tokens: int) -> None:
    """Without a card everything lies in RAM, and the library asks for more than there is without a word."""
    import xllamacpp

    if any("GPU" in str(device.get("type")) for device in xllamacpp.get_device_info()):
        return
    heads = sum(spec.kv_heads) * (spec.head_size_k + spec.head_size_v)
    needed_bytes = spec.weights_bytes + tokens * heads * _CACHE_ELEMENT_BYTES
    free_bytes = psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise DoesNotFit(
            f"`{spec.path.name}` with {tokens:,} tokens of context needs {format_bytes(needed_bytes)} "
            f"(weights and KV cache), {format_bytes(free_bytes)} of RAM are free",
            hint="give fewer contexts or context_tokens, or a smaller quantisation of the model",
        )


def _load(
    spec: ModelSpec,
    contexts: int,
    context_tokens: int,
    threads: int | None,
    gpu_layers: int | None,
    chat_template: str | None,
    verbosity: int,
) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(spec.path)
    params.n_parallel = contexts
    params.n_ctx = contexts * context_tokens
    params.kv_unified = False
    params.fit_params = False  # it would change the contexts asked for
    params.cache_ram_mib = 0  # a prompt cache of up to 8 GiB in RAM by default, which looks like a leak
    params.n_ctx_checkpoints = 0
    params.cpuparams.n_threads = threads or len(os.sched_getaffinity(0))
    params.verbosity = verbosity
    params.reasoning_format = xllamacpp.common_reasoning_format.COMMON_REASONING_FORMAT_NONE  # all text is content
    params.ui = params.endpoint_slots = False
    if gpu_layers is not None:
        params.n_gpu_layers = gpu_layers
    if chat_template is not None:
        params.chat_template = chat_template
    # The library always listens (an empty host list crashes it), so it gets a socket in a private folder, a random
    # key, and no address any more as soon as it is up.
    folder = tempfile.mkdtemp(prefix="llamarack-", dir=None if _is_short(tempfile.gettempdir()) else "/tmp")
    try:
        params.hostnames = [f"{folder}/s.sock"]
        params.api_keys = [secrets.token_hex(16)]
        params.n_threads_http = 1
        server = xllamacpp.Server(params)
        # Proves that it answers; and a server closed before its loop has taken a first task hangs for ever in its
        # destructor (seen with xllamacpp 2026.10.11549, within 35 openings).
        server.handle_completions({"prompt": "a", "max_tokens": 1})
        return server
    except RuntimeError as error:
        raise StartFailed(
            f"llama.cpp could not load `{spec.path}`: {error}",
            hint="see its log: `embed.open(..., verbosity=4)`",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_short(folder: str) -> bool:
    return len(os.fsencode(folder)) + len("/llamarack-12345678/s.sock") <= _SOCKET_PATH_MAX_BYTES
