"""The environments that children start with. Alone in a file so that it costs nothing to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ENGINE_KEY = "LLAMARACK_ENGINE_KEY"  # of a worker of ours
KEEPER_MARK = "LLAMARACK_KEEPER"  # in every descendant of a keeper: its control socket, which no other process has
# What a child inherits of the supervisor's environment: enough to find libraries, certificates and the locale.
_INHERITED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
_INHERITED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "NVSHMEM_", "VLLM_", "OMP_", "GGML_", "NVIDIA_", "CUDA_MPS_")

_OF_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def engine_environment(
    inherited: Mapping[str, str], card_uuids: Sequence[str], extra: Mapping[str, str]
) -> dict[str, str]:
    """The environment of an engine: pinned to its cards, offline, silent about its use; `extra` wins."""
    kept = {k: v for k, v in inherited.items() if k in _INHERITED or k.startswith(_INHERITED_PREFIXES)}
    return {
        **kept,
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(card_uuids),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": "127.0.0.1,localhost,::1",
        **extra,
    }


def gateway_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """All of ours but what a service manager tells to its own child alone."""
    return {**{k: v for k, v in inherited.items() if k not in _OF_MANAGER}, "PYTHONUNBUFFERED": "1"}
