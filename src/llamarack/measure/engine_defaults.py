"""What an engine does when nobody tells it anything: the settings that a gain is measured against. Pure.

Sources: llama-server b11434 (`tools/server/server.cpp`, `common/common.h`): four slots that share one cache of the
model's own context, batches of 2048 tokens in steps of 512. vLLM 0.32.0 (`engine/arg_utils.py`, `config/cache.py`):
sequences and tokens of a step by card, 92 % of its memory, the model's own context; seen on an NVIDIA H200 with 0.25.1:
1024 sequences, 8192 tokens.
Cards and how the model is cut over them, the cache's type, `engine_args` and `env` stay the file's: what is compared is
the same precision on the same hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llamarack.config import Group, Limits
from llamarack.hardware.machine import Card
from llamarack.units import GIB

_LLAMACPP_SLOTS = 4
_VLLM_MEMORY_FRACTION = 0.92
_VLLM_CPU_SEQUENCES_PER_RANK = 128
_VLLM_CPU_BATCH_TOKENS_PER_RANK = 2048


def own_limits(group: Group, cards: Sequence[Card], context_train_tokens: int | None) -> Limits:
    """`cards`: of the group; none: the processor."""
    own: dict[str, Any] = {"batch_tokens": "auto", "context_tokens": context_train_tokens}
    if group.engine == "llamacpp":
        own |= {"sequences": _LLAMACPP_SLOTS, "kv_unified": True}
    else:
        ranks = group.tensor_parallel * group.pipeline_parallel
        own |= {"sequences": vllm_sequences(cards, ranks), "kv_cache_bytes": "auto"}
        own |= {"gpu_memory_fraction": _VLLM_MEMORY_FRACTION}
        if not cards:
            # There the plan gives every sequence its whole context, where vLLM itself would take 92 % of the host.
            own |= {"batch_tokens": _VLLM_CPU_BATCH_TOKENS_PER_RANK * ranks, "context_tokens": None}
    own["context_tokens"] = own["context_tokens"] or group.limits.context_tokens
    return replace(group.limits, **own)


def vllm_sequences(cards: Sequence[Card], ranks: int) -> int:
    """max_num_seqs of a server."""
    if not cards:
        return _VLLM_CPU_SEQUENCES_PER_RANK * ranks
    card = cards[0]
    if card.memory_total_bytes >= 160 * GIB:
        return 1024
    return 1024 if card.memory_total_bytes >= 70 * GIB and "a100" not in card.name.lower() else 256
