"""What vLLM's /metrics says of its KV cache. Names of vLLM 0.6 to 0.32; the older ones come second. Pure."""

from __future__ import annotations

import re

from llamarack.engine.dialect import KvUse, number_of

_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # a fraction, whatever the name says
_PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
_WAITING = ("vllm:num_requests_waiting",)
_LABEL = re.compile(r'(block_size|num_gpu_blocks)="(\d+)"')


def kv_use(metrics_text: str) -> KvUse | None:
    """Sums over the engines of one server but for the fraction, whose highest counts. None without any of it."""
    values: dict[str, list[float]] = {}
    kv_tokens: int | None = None
    page_tokens: int | None = None
    for line in metrics_text.splitlines():
        if not line.startswith("vllm:"):
            continue
        if line.startswith("vllm:cache_config_info{"):
            labels = dict(_LABEL.findall(line))
            if len(labels) == 2:
                page_tokens = int(labels["block_size"])
                kv_tokens = (kv_tokens or 0) + page_tokens * int(labels["num_gpu_blocks"])
            continue
        name, _, value = line.rpartition(" ")
        if (number := number_of(value)) is not None:
            values.setdefault(name.partition("{")[0], []).append(number)

    def found(names: tuple[str, ...]) -> list[float] | None:
        return next((values[name] for name in names if name in values), None)

    used, preemptions, waiting = found(_USED), found(_PREEMPTIONS), found(_WAITING)
    if used is None and kv_tokens is None:
        return None
    return KvUse(
        kv_tokens=kv_tokens,
        page_tokens=page_tokens,
        used_fraction=max(used) if used else None,
        preemptions=int(sum(preemptions)) if preemptions else None,
        waiting=int(sum(waiting)) if waiting else None,
    )
