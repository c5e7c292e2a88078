"""`plan --explain`: where each number of a candidate comes from, in formulas with this model's numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from llamarack.model.spec import ModelSpec
from llamarack.plan import llamacpp, vllm
from llamarack.plan.devices import place_of
from llamarack.plan.engine_data import llamacpp_law
from llamarack.plan.record import CPU_INDEX, Candidate, CardPlan
from llamarack.units import format_bytes


def explanation(candidate: Candidate, spec: ModelSpec) -> Iterator[str]:
    yield f"{candidate.engine}, {spec.path}: {spec.layers} layers, hidden {spec.hidden_size}, feed-forward " + (
        f"{max(spec.feed_forward_sizes)}, {max(spec.attention_heads)} heads, {max(spec.kv_heads)} KV heads of "
        f"{spec.head_size_k}, vocabulary {spec.vocab_size}"
    )
    if candidate.engine == "llamacpp":
        yield from _llamacpp(candidate, spec)
    elif candidate.engine == "vllm":
        yield from _vllm(candidate, spec)
    for card in candidate.cards:
        yield _sum(card)


def _llamacpp(candidate: Candidate, spec: ModelSpec) -> Iterator[str]:
    settings = llamacpp.Settings(
        sequences=candidate.sequences,
        context_tokens=candidate.context_tokens,
        kv_dtype=candidate.kv_dtype,
        kv_unified=candidate.kv_unified,
        batch_tokens=candidate.batch_tokens,
        micro_batch_tokens=candidate.micro_batch_tokens or candidate.batch_tokens,
    )
    yield "weights: the file's tensors; the embedding stays on the host, the head goes to the last card"
    if candidate.tensor_split:
        yield f"split: {', '.join(f'{share:.2f}' for share in candidate.tensor_split)} of the layers, in card order"
    yield (
        f"KV: {settings.total_cells} cells x {spec.layers} layers x {max(spec.kv_heads)} heads x "
        f"({spec.head_size_k} + {spec.head_size_v}) x {llamacpp.KV_ELEMENT_BYTES[candidate.kv_dtype]:g} bytes"
    )
    yield (
        f"compute: 2 x {settings.step_tokens} x {settings.stream_cells} cells of mask, and the largest of the "
        "feed-forward step, the logits and (quantised KV) a copy of one layer's KV"
    )
    first = candidate.cards[0].index
    backend = "cpu" if first == CPU_INDEX else "rpc" if first < CPU_INDEX else "cuda"
    build = llamacpp_law(backend, None).build
    yield f"coefficients: dry runs and buffers of llama.cpp b{build} ({backend}), llamacpp.yaml"
    yield "upper end: logits of every token, as the engine's dry run assumes, and the context band's upper end"


def _vllm(candidate: Candidate, spec: ModelSpec) -> Iterator[str]:
    degree, stages = candidate.tensor_parallel, candidate.pipeline_parallel
    plural = "stage" if stages == 1 else "stages"
    yield f"weights: every matrix cut {degree} ways, layers in {stages} {plural}; norms whole on every card"
    kv_heads = max(1, max(spec.kv_heads) // degree)
    copies = " (copied: more cards than KV heads)" if degree > max(spec.kv_heads) else ""
    yield (
        f"KV: blocks of {vllm.BLOCK_TOKENS} tokens x {-(-spec.layers // stages)} layers x {kv_heads} heads{copies} x "
        f"({spec.head_size_k} + {spec.head_size_v}) x {vllm.KV_ELEMENT_BYTES[candidate.kv_dtype]:g} bytes; "
        "the poorest card sets the number of blocks"
    )
    yield (
        f"budget: {candidate.gpu_memory_fraction} of what CUDA calls the total, less weights, one step of "
        f"{candidate.batch_tokens} tokens, and graphs; written as --kv-cache-memory-bytes {candidate.kv_cache_bytes}"
    )
    yield f"coefficients: a run of vllm {vllm.constants_of(None).version} on an H200, rules read in 0.33.0: vllm.yaml"
    piecewise, full = vllm.graph_sizes(candidate.sequences, candidate.batch_tokens)
    yield f"graphs: {len(piecewise)} in pieces, {len(full)} whole; sampler: {candidate.sequences} rows"


def _sum(card: CardPlan) -> str:
    terms = card.terms
    named = {
        "weights": terms.weights_bytes,
        "KV": terms.kv_bytes,
        "compute": terms.compute_bytes,
        "graphs": terms.graphs_bytes,
        "sampler": terms.sampler_bytes,
        "communication": terms.communication_bytes,
        "context": terms.context_bytes,
    }
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in named.items() if size)
    where = place_of(card)
    return f"{where}: {parts} = {format_bytes(card.total_bytes)}, at most {format_bytes(card.total_high_bytes)}"
