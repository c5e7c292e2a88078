"""Records: what a plan says. No I/O. Units: bytes, seconds, tokens, fractions 0 to 1; `None` is "not known".

`CardPlan.total_bytes` is what the device should show; the margin is not in it. `fits` is judged by `total_high_bytes`.
A machine without cards (or `gpus: []`) is planned as one device: its memory, index -1, name `CPU`.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1
CPU_INDEX = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The memory of one device by purpose."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    graphs_bytes: int = 0
    sampler_bytes: int = 0
    communication_bytes: int = 0
    context_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.kv_bytes
            + self.compute_bytes
            + self.graphs_bytes
            + self.sampler_bytes
            + self.communication_bytes
            + self.context_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """One device of a replica: what it has, and what each term takes of it."""

    index: int
    name: str
    uuid: str | None
    memory_total_bytes: int
    memory_free_bytes: int | None
    terms: Terms
    total_bytes: int
    total_high_bytes: int
    free_after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Speed at the asked concurrency. `per_token_s`: of one stream; `tokens_per_s`: of all streams together."""

    first_token_s: float | None
    per_token_s: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the service is asked to carry. `context_tokens`: one sequence, prompt and output; `concurrency`: at once."""

    context_tokens: int
    concurrency: int
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One legal or rejected way to run the model. `cards`: all cards of one replica, in the engine's order;
    `replica_cards`: the card indices of every replica. `tensor_split`: share per card, sums to 1. `predicted`: of a
    burst, in which all requests arrive at once; `closed_loop`: once each client sends its next request when the last
    one is answered, which is what `bench` measures.
    """

    engine: str
    replicas: int
    tensor_parallel: int
    pipeline_parallel: int
    split_mode: str | None
    tensor_split: tuple[float, ...] | None
    fits: bool
    tight: bool
    reasons: tuple[str, ...]
    cards: tuple[CardPlan, ...]
    replica_cards: tuple[tuple[int, ...], ...]
    context_tokens: int
    sequences: int  # per replica
    batch_tokens: int
    kv_dtype: str
    threads: int | None
    max_sequences: int | None
    max_context_tokens: int | None
    predicted: Predicted
    closed_loop: Predicted
    kv_cache_bytes: int | None = None  # per card, vllm
    gpu_memory_fraction: float | None = None  # vllm
    kv_unified: bool = False  # llamacpp
    micro_batch_tokens: int | None = None  # llamacpp n_ubatch
    gpu_layers: int | None = None  # llamacpp: fewer than all, as the file asks
    model_path: str | None = None
    quantization: str | None = None  # `Q4_K_M`, `GPTQ-4bit-128g`
    host_bytes: int = 0  # of the model that stays in host memory beside the cards
    replica_plans: tuple[tuple[CardPlan, ...], ...] = ()  # of every replica; `cards` is the poorest one's
    replica_splits: tuple[tuple[float, ...] | None, ...] = ()  # `tensor_split` of every replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`candidates`: best first; those that do not fit come last with their reasons."""

    schema_version: int = SCHEMA_VERSION
    model_name: str
    model_path: str
    load: Load
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates and self.candidates[0].fits else None
