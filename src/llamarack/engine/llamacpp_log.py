"""What a started llama.cpp says in its log (verbosity 4): its devices, their buffers, the layers they took. Pure.

Lines: b11434 and b11549 (`src/llama.cpp`, `src/llama-model.cpp`, `src/llama-context.cpp`, `ggml/src/ggml-rpc`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from llamarack.config import Group
from llamarack.engine.device_memory import DeviceTerms
from llamarack.errors import NeverReady
from llamarack.plan.record import CPU_INDEX, Candidate
from llamarack.units import MIB

# `load_tensors:   CPU_Mapped model buffer size =    92.10 MiB`
_BUFFER = re.compile(r"(\S+) +(model|KV|compute) buffer size = +([\d.]+) MiB")
_BUFFER_TERMS = {"model": "weights_bytes", "KV": "kv_bytes", "compute": "compute_bytes"}
# `using device RPC0 (127.0.0.1:50052) (unknown id) - 24020 MiB free`
_USING = re.compile(r"using device (\S+) \((.*?)\) \(")
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_SYSTEM_INFO = re.compile(r"system_info: .*")
_FEATURE = re.compile(r"\b([A-Z][A-Z0-9_]+) = 1\b")


def buffers(log_lines: Iterable[str]) -> list[DeviceTerms]:
    """Buffers by device, in the engine's order: cards and RPC devices where there are any, else the processor. In
    tensor mode the sizes are the largest of all cards' (`Meta`) and say nothing of one."""
    used: list[str] = []
    sizes: dict[str, dict[str, int]] = {}
    is_meta = False
    for line in log_lines:
        if using := _USING.search(line):
            used.append(_device(using[1], using[2], used))
            continue
        match = _BUFFER.search(line)
        if match is None:
            continue
        if match[1].startswith("Meta"):
            is_meta = True
            continue
        device = "CPU" if match[1].startswith("CPU") else match[1]
        terms = sizes.setdefault(device, {})
        term = _BUFFER_TERMS[match[2]]
        terms[term] = terms.get(term, 0) + round(float(match[3]) * MIB)
    if is_meta:
        return []
    named = [name for name in dict.fromkeys([*used, *sizes]) if not _is_host(name)]
    if named:
        nothing = dict.fromkeys(_BUFFER_TERMS.values(), 0)
        return [DeviceTerms(device=name, terms=sizes.get(name, nothing)) for name in named]
    return [DeviceTerms(device=name, terms=terms) for name, terms in sizes.items() if name == "CPU"]


def _device(name: str, description: str, before: Sequence[str]) -> str:
    """The name that its buffers bear: RPC devices are counted over all servers, their buffers by server."""
    if not name.startswith("RPC"):
        return name
    own = sum(other.endswith(f"[{description}]") for other in before)
    return f"RPC{own}[{description}]"


def _is_host(device: str) -> bool:
    return device == "CPU" or device.endswith("_Host")


def require_layers(candidate: Candidate, group: Group, log_lines: Iterable[str]) -> None:
    """Raises NeverReady where fewer or more layers went to the cards than planned, or other devices were taken."""
    lines = list(log_lines)
    devices = [card for card in candidate.cards if card.index != CPU_INDEX]
    taken = [using[1] for line in lines if (using := _USING.search(line))]
    if devices and taken and len(taken) != len(devices):
        raise NeverReady(
            f"the engine took {len(taken)} devices ({', '.join(taken)}), {len(devices)} were planned",
            hint="devices that the plan does not know: look at CUDA_VISIBLE_DEVICES in env and at engine_args",
        )
    for line in lines:
        if match := _OFFLOADED.search(line):
            offloaded, all_layers = int(match[1]), int(match[2])
            planned = min(all_layers if group.gpu_layers == "all" else group.gpu_layers, all_layers) if devices else 0
            if offloaded != planned:
                raise NeverReady(
                    f"the engine put {offloaded} of {all_layers} layers on its devices, {planned} were planned",
                    hint="a build without a GPU device, or engine_args that move layers; llamarack engine list FILE",
                )


def instruction_sets(log_lines: Iterable[str]) -> tuple[str, ...]:
    """Those that the engine says its processor code was built with and found: `AVX2`, `AVX512_VNNI`, `AMX_INT8`."""
    found: list[str] = []
    for line in log_lines:
        if info := _SYSTEM_INFO.search(line):
            found += _FEATURE.findall(info[0])
    return tuple(dict.fromkeys(found))
