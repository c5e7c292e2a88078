"""One adaptor per engine: how it is started, how it is read, why it died; imported when it is asked for.

- `dialect`, `dialects`: how a running engine is spoken with, all that the gateway knows of it
- `adaptor`, `device_memory`: the contract of what starts it, and its records
- `llamacpp`, `llamacpp_worker`, `llamacpp_options`, `llamacpp_log`: llama.cpp in a process of its own
- `llamacpp_binary`, `rpc_devices`, `builds`: any llama-server, its devices and those it reaches, for the planner
- `llamacpp_build`, `llamacpp_proof`, `probe_model`, `install_llamacpp`: llama.cpp compiled here, and proven
- `command_line`: options in the spelling of the installed version
- `vllm`, `vllm_options`, `vllm_help`, `vllm_faults`, `vllm_memory`: vLLM in an environment of its own
- `transformers`, `transformers_worker`: the reference, plain PyTorch in a process of its own
- `installed`, `install`: engines in environments of their own, found and made
- `chat_template`: templates by name
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamarack.engine.adaptor import Adaptor

# Each in the module of the engine's name.
_CLASSES = {
    "llamacpp": "LlamaCpp",
    "transformers": "Transformers",
    "vllm": "Vllm",
}


class _Adaptors(Mapping[str, "Adaptor"]):
    def __init__(self) -> None:
        self._made: dict[str, Adaptor] = {}

    def __getitem__(self, name: str) -> Adaptor:
        if name not in self._made:
            self._made[name] = getattr(import_module(f"{__name__}.{name}"), _CLASSES[name])()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


ADAPTORS: Mapping[str, Adaptor] = _Adaptors()
