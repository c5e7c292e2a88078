"""What vLLM will hold on each card, by term, and how many KV tokens its budget leaves. Pure.

The budget (vLLM 0.33.0, `v1/worker/gpu_worker.py`, `utils/mem_utils.py`): a share of the card's memory, less weights,
the peak of one step, and graphs, is KV. `--kv-cache-memory-bytes` replaces that arithmetic.
KV pages: `v1/core/kv_cache_utils.py`; one number of blocks for all ranks, so the poorest rank decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarack.errors import ConfigError
from llamarack.model.spec import ModelSpec
from llamarack.plan.engine_data import data_file, version_key
from llamarack.plan.shape import ModelShape
from llamarack.plan.vllm_shard import RankWeights, shard
from llamarack.units import GIB, MIB

BLOCK_TOKENS = 16  # default block size on CUDA
_CPU_BLOCK_TOKENS = 128  # on the processor (vLLM 0.32.0, `platforms/cpu.py`)
# Bytes per element; fp8 has one scale per tensor, which is nothing.
KV_ELEMENT_BYTES = {"auto": 2.0, "f16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp8_e5m2": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    sequences: int  # max_num_seqs
    context_tokens: int  # max_model_len
    kv_dtype: str
    batch_tokens: int  # max_num_batched_tokens
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    is_eager: bool = False  # captures no graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    version: str
    graph_mib_per_piecewise_layer: float  # a graph of any batch, cut at each layer's attention
    graph_mib_per_full_layer: float  # a graph of a batch that only decodes, in one piece
    graph_mib_per_token: Mapping[str, float]  # of the largest graph, by what the activations are: `f16`, `fp8`
    reserved_mib: int
    verified: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """One rank without its KV cache. `page_bytes`: one block of all its layers; `start_bytes`: what the start of vLLM
    subtracts from the budget beside the weights.
    """

    weights_bytes: int
    compute_bytes: int
    compute_high_bytes: int
    graphs_bytes: int
    sampler_bytes: int
    communication_bytes: int
    page_bytes: int
    start_bytes: int


def constants_of(version: str | None) -> Constants:
    """Of `version`, else of the nearest older one (the oldest if none is older); None: the newest known."""
    rows = sorted(data_file("vllm.yaml")["versions"], key=lambda row: version_key(str(row["version"])))
    if version is None:
        return Constants(**rows[-1])
    older = [row for row in rows if version_key(str(row["version"])) <= version_key(version)] or rows[:1]
    exact = version_key(str(older[-1]["version"])) == version_key(version)
    return Constants(**older[-1], verified=exact)


def check_kv_dtype(kv_dtype: str) -> str:
    if kv_dtype not in KV_ELEMENT_BYTES:
        raise ConfigError(
            f"`kv_dtype`: vllm has no `{kv_dtype}`", hint="one of: " + ", ".join(sorted(KV_ELEMENT_BYTES))
        )
    return kv_dtype


def default_batch_tokens(card_name: str, memory_total_bytes: int) -> int:
    """max_num_batched_tokens of a server by card (vLLM 0.33.0, `engine/arg_utils.py`)."""
    if memory_total_bytes >= 160 * GIB:
        return 16384
    if memory_total_bytes >= 70 * GIB and "a100" not in card_name.lower():
        return 8192
    return 2048


def cuda_total_bytes(memory_total_bytes: int) -> int:
    """What CUDA calls the total, of which the fraction is taken: the driver keeps some of what NVML reports."""
    reserved = data_file("vllm.yaml")["driver_reserved"]
    kept = reserved["fixed_mib"] * MIB + reserved["share"] * memory_total_bytes
    return memory_total_bytes - int(kept)


def rank_loads(shape: ModelShape, settings: Settings, constants: Constants) -> tuple[RankLoad, ...]:
    """One rank of each pipeline stage."""
    stages = shard(shape, settings.tensor_parallel, settings.pipeline_parallel)
    last = len(stages) - 1
    return tuple(
        _rank_load(shape, settings, constants, stage, is_last=index == last) for index, stage in enumerate(stages)
    )


def _rank_load(
    shape: ModelShape, settings: Settings, constants: Constants, stage: RankWeights, *, is_last: bool
) -> RankLoad:
    spec, degree = shape.spec, settings.tensor_parallel
    rules = data_file("vllm.yaml")
    activation = rules["activation"]
    factor = activation["factor"].get(degree, activation["factor"][8])
    forward = max(2 * settings.batch_tokens * spec.hidden_size * factor, activation["floor_mib"] * MIB)
    sampling = rules["sampler_copies"] * 4 * settings.sequences * spec.vocab_size if is_last else 0
    compute = round(max(forward, sampling))
    ranks = degree * settings.pipeline_parallel
    communication = rules["communication_mib"].get(ranks, rules["communication_mib"][16]) if ranks > 1 else 0
    element_bytes = KV_ELEMENT_BYTES[settings.kv_dtype]
    elements = sum(
        max(1, spec.kv_heads[layer] // degree) * (spec.head_size_k + spec.head_size_v) for layer in stage.layers
    )
    sampler = 4 * settings.sequences * (spec.vocab_size + -(-spec.vocab_size // 32)) if is_last else 0
    tables = 2 * 4 * settings.sequences * -(-settings.context_tokens // BLOCK_TOKENS)
    return RankLoad(
        weights_bytes=stage.weights_bytes,
        compute_bytes=compute,
        compute_high_bytes=round(compute * activation["high_factor"]),
        graphs_bytes=0 if settings.is_eager else _graphs_bytes(constants, settings, spec, len(stage.layers)),
        sampler_bytes=sampler + tables,
        communication_bytes=communication * MIB,
        page_bytes=round(BLOCK_TOKENS * elements * element_bytes),
        start_bytes=compute + constants.reserved_mib * MIB,
    )


def _graphs_bytes(constants: Constants, settings: Settings, spec: ModelSpec, layers: int) -> int:
    """The largest graph keeps its activations, and with a 16-bit cache a 16-bit row a layer; the others reuse them."""
    piecewise, full = graph_sizes(settings.sequences, settings.batch_tokens)
    of_each = constants.graph_mib_per_piecewise_layer * len(piecewise) + constants.graph_mib_per_full_layer * len(full)
    activations = "fp8" if spec.quantization.activations == "fp8" else "f16"
    of_largest = constants.graph_mib_per_token[activations] * piecewise[-1]
    has_rows = KV_ELEMENT_BYTES[settings.kv_dtype] == 2
    rows = 2 * piecewise[-1] * layers * spec.hidden_size // settings.tensor_parallel if has_rows else 0
    return round((of_each * layers + of_largest) * MIB) + rows


def graph_sizes(sequences: int, batch_tokens: int) -> tuple[list[int], list[int]]:
    """Batch sizes that CUDA graphs are captured for: 1, 2, 4, by 8 from 8, by 16 from 256. In pieces to twice the
    sequences, 512 or a step's tokens, and whole, for batches that only decode, to the sequences (vLLM 0.32.0,
    `config/vllm.py`, `v1/worker/gpu/cudagraph_utils.py`).
    """
    top = min(2 * sequences, 512, batch_tokens)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), sequences, batch_tokens}
    piecewise = sorted(size for size in sizes if size <= top)
    return piecewise, [size for size in piecewise if size <= sequences]


def blocks_needed(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def cpu_blocks(sequences: int, context_tokens: int) -> int:
    """Blocks of `BLOCK_TOKENS` that full-length sequences fill on the processor, whose own blocks are larger, with the
    one that vLLM keeps empty."""
    return (sequences * -(-context_tokens // _CPU_BLOCK_TOKENS) + 1) * (_CPU_BLOCK_TOKENS // BLOCK_TOKENS)


def budget_blocks(loads: Sequence[RankLoad], totals_bytes: Sequence[int], fraction: float) -> int:
    """KV blocks that `gpu_memory_utilization` leaves on the poorest rank; 0 where weights alone exceed it."""
    return min(
        max(int(cuda_total_bytes(total) * fraction) - load.weights_bytes - load.start_bytes, 0) // load.page_bytes
        for load, total in zip(loads, totals_bytes, strict=True)
    )


def kv_tokens(blocks: int, context_tokens: int) -> int:
    """The `GPU KV cache size` that vLLM prints: full-length requests that fit, in tokens."""
    return int(blocks / blocks_needed(context_tokens) * context_tokens)
