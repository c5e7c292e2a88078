"""The record between an engine's memory model and the planner: one replica on its devices. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from llamarack.plan.record import CardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """`problems`: what forbids it, in words; `notes`: what the user should know although it runs."""

    cards: tuple[CardPlan, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kv_dtype: str
    batch_tokens: int
    micro_batch_tokens: int | None = None
    tensor_split: tuple[float, ...] | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_fraction: float | None = None
    host_bytes: int = 0
    is_legal: bool = True  # false: no memory would help
    is_kv_scarce: bool = False  # less than 1 GiB of KV beyond what was asked
    max_sequences: int | None = None  # at this context
    max_context_tokens: int | None = None  # at this number of sequences
