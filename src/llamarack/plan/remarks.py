"""What a plan says beside its numbers: limits both ways, the other engine, what would do if nothing fits. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llamarack.model.spec import ModelFormat, ModelSpec
from llamarack.plan.catalogue import catalogue, machine_of
from llamarack.plan.ranking import Question, ranked_candidates
from llamarack.plan.record import CPU_INDEX, Candidate
from llamarack.plan.reference import Dimensions, gguf_spec, safetensors_spec
from llamarack.plan.shape import ModelShape, shape_of
from llamarack.plan.speed import lengths
from llamarack.units import GIB, format_bytes, format_count, format_duration, format_rate

_FEW, _MANY = 1, 64  # concurrencies at which engines are compared
# Decoders whose tensors and KV cache are those of LLaMA: `general.architecture` and `model_type`.
_SAME_SHAPE = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_COARSER_GGUF = ("Q8_0", "Q4_K_M")
_COARSER_SAFETENSORS = ("int8", "gptq")


def remarks(question: Question, ranked: tuple[Candidate, ...]) -> tuple[str, ...]:
    best = ranked[0] if ranked and ranked[0].fits else None
    if best is None:
        return tuple(nearest(question, ranked))
    prompt, output = lengths(question.load)
    notes = [
        f"speed: prompts of {prompt} tokens, answers of {output}, {question.load.concurrency} sent at once",
        f"limits of the first: {format_count((best.max_sequences or 0) * best.replicas)} sequences of "
        f"{format_count(best.context_tokens)} tokens, or {format_count(best.max_context_tokens)} tokens at "
        f"{format_count(best.sequences * best.replicas)} sequences",
    ]
    steady = best.closed_loop
    if steady != best.predicted and steady.per_token_s is not None:
        notes.insert(
            1,
            f"as `bench` drives it, the next request when one is answered: {format_rate(steady.tokens_per_s)}, "
            f"{format_duration(steady.per_token_s)} per token, {format_duration(steady.first_token_s)} to the first",
        )
    smallest = smallest_cards(question, (1,)) if question.machine.cards else None
    if smallest is not None:
        notes.append(f"the smallest single card that carries this load: {smallest}")
    architecture = question.shapes[0].spec.architecture
    if architecture not in _SAME_SHAPE:
        notes.insert(
            0,
            f"architecture `{architecture}`: memory and speed are LLaMA's formulas with its sizes, not held against a "
            "run, and the engine may not know it",
        )
    if best.predicted.tokens_per_s is None:
        notes.append("no speed: bandwidth or arithmetic of this device is not known here")
    return (*notes, *_faster_but_later(question, ranked), *_copies_or_cuts(best, ranked), *_by_load(question))


def _faster_but_later(question: Question, ranked: tuple[Candidate, ...]) -> Iterator[str]:
    """The fastest way that fits, where another one leads: a reader of the table asks why."""
    best, fitting = ranked[0], [one for one in ranked if one.fits]
    if question.goal == "latency":
        fastest = min(fitting, key=lambda one: one.predicted.per_token_s or float("inf"))
        is_faster = (fastest.predicted.per_token_s or 0.0) < (best.predicted.per_token_s or 0.0)
    else:
        fastest = max(fitting, key=lambda one: one.predicted.tokens_per_s or 0.0)
        is_faster = (fastest.predicted.tokens_per_s or 0.0) > (best.predicted.tokens_per_s or 0.0)
    if not is_faster:
        return
    if fastest.tight and not best.tight:
        why = "under 1 GiB would stay free"
    elif fastest.split_mode == "tensor" and best.split_mode != "tensor":
        why = "llama.cpp calls its split by tensor experimental; `split_mode: tensor` chooses it"
    else:
        why = f"its {fastest.quantization} weights are coarser"
    yield f"the fastest is {describe(fastest)}, but not first: {why}"


def _copies_or_cuts(best: Candidate, ranked: tuple[Candidate, ...]) -> Iterator[str]:
    """Whether more cards for one copy help or hurt, where both ways use the same cards."""
    used = {index for cards in best.replica_cards for index in cards}
    for other in ranked:
        same = {index for cards in other.replica_cards for index in cards} == used and other.fits
        if not same or other.engine != best.engine or other.quantization != best.quantization:
            continue
        if (other.replicas == 1) == (best.replicas == 1):
            continue
        theirs, ours = other.predicted.tokens_per_s, best.predicted.tokens_per_s
        if theirs and ours:
            yield f"{describe(best)} is predicted to be {ours / theirs:.1f}x as fast as {describe(other)}"
        return


def _by_load(question: Question) -> Iterator[str]:
    """Which engine leads with few and with many users, from the files at hand or as they would be."""
    if len(question.engines) < 2 or not question.machine.cards:
        return
    shapes = list(question.shapes)
    assumed = [_counterpart(shapes[0].spec)] if len({shape.spec.format for shape in shapes}) == 1 else []
    shapes += [shape_of(spec) for spec in assumed]
    leaders = []
    for concurrency in (_FEW, _MANY):
        asked = replace(
            question, shapes=tuple(shapes), load=replace(question.load, concurrency=concurrency), goal="throughput"
        )
        ranked = ranked_candidates(asked, want_limits=False)
        fitting = [one for one in ranked if one.fits and one.predicted.tokens_per_s]
        fastest = {one.engine: one for one in sorted(fitting, key=lambda one: one.predicted.tokens_per_s or 0.0)}
        if len(fastest) < 2:
            return
        leaders.append(sorted(fastest.values(), key=lambda one: -(one.predicted.tokens_per_s or 0.0)))
    for concurrency, (first, second) in zip((_FEW, _MANY), leaders, strict=True):
        ratio = (first.predicted.tokens_per_s or 0.0) / (second.predicted.tokens_per_s or 1.0)
        yield (
            f"with {concurrency} at once {first.engine} leads {second.engine} {ratio:.1f}x: "
            f"{format_rate(first.predicted.tokens_per_s)} ({first.quantization}) against "
            f"{format_rate(second.predicted.tokens_per_s)} ({second.quantization})"
        )
    if assumed:
        yield f"the {assumed[0].quantization.label} {assumed[0].format} file of this comparison is not at hand"


def _counterpart(spec: ModelSpec) -> ModelSpec:
    """The same dimensions in the format of the other engine."""
    size = dimensions(spec)
    if spec.format is ModelFormat.GGUF:
        return safetensors_spec(size, "f16")
    return gguf_spec(size, "F16" if (spec.quantization.bits or 16) > 8 else "Q4_K_M")


def dimensions(spec: ModelSpec) -> Dimensions:
    return Dimensions(
        name=spec.name or spec.path.stem,
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        feed_forward_size=max(spec.feed_forward_sizes),
        attention_heads=max(spec.attention_heads),
        kv_heads=max(spec.kv_heads),
        head_size=spec.head_size_k,
        vocab_size=spec.vocab_size,
        context_train_tokens=spec.context_train_tokens or 4096,
        tied_embeddings=spec.tied_embeddings,
    )


def nearest(question: Question, ranked: tuple[Candidate, ...]) -> Iterator[str]:
    """Configurations that would do: fewer sequences, a shorter context, coarser weights, other cards."""
    load = question.load
    widest = max(ranked, key=lambda one: (one.max_sequences or 0) * one.replicas, default=None)
    if widest is not None and widest.max_sequences:
        yield f"--concurrency {widest.max_sequences * widest.replicas} fits: {describe(widest)}"
    longest = max(ranked, key=lambda one: one.max_context_tokens or 0, default=None)
    if longest is not None and longest.max_context_tokens and longest.max_context_tokens < load.context_tokens:
        yield f"--context {longest.max_context_tokens} fits: {describe(longest)}"
    for spec in _coarser(question.shapes[-1]):
        found = ranked_candidates(replace(question, shapes=(shape_of(spec),)))
        able = max(found, key=lambda one: (one.fits, (one.max_sequences or 0) * one.replicas), default=None)
        if able is not None and able.max_sequences:
            most = format_count(able.max_sequences * able.replicas)
            file = f"{spec.quantization.label} ({format_bytes(spec.weights_bytes)} of weights)"
            yield f"{file} fits with --concurrency up to {most}: {describe(able)}"
    cards = [found for found in (smallest_cards(question, (1,)), smallest_cards(question, (2, 4))) if found]
    if cards:
        yield f"these cards would do: {' or '.join(cards)}"


def describe(candidate: Candidate) -> str:
    """`vllm, 2 replicas, TP 2 on cards 0,1 | 2,3`."""
    parts = [candidate.engine]
    if candidate.replicas > 1:
        parts.append(f"{candidate.replicas} replicas")
    if candidate.tensor_parallel > 1:
        parts.append(f"TP {candidate.tensor_parallel}")
    if candidate.pipeline_parallel > 1:
        parts.append(f"PP {candidate.pipeline_parallel}")
    if candidate.split_mode and any(len(cards) > 1 for cards in candidate.replica_cards):
        parts.append(f"split by {candidate.split_mode}")
    remote = sum(index < CPU_INDEX for index in candidate.replica_cards[0]) if candidate.replica_cards else 0
    hands = [",".join(str(index) for index in cards if index >= 0) for cards in candidate.replica_cards]
    places = [f"on {remote} RPC device{'s' if remote > 1 else ''}"] if remote else []
    if any(hands):
        places.append(f"on cards {' | '.join(hand for hand in hands if hand)}")
    return f"{', '.join(parts)} {' and '.join(places) or 'on the CPU'}"


def _coarser(shape: ModelShape) -> Iterator[ModelSpec]:
    """The model as finer-first coarser files, those that are smaller than what is at hand."""
    spec, size = shape.spec, dimensions(shape.spec)
    if spec.format is ModelFormat.GGUF:
        made = [gguf_spec(size, label) for label in _COARSER_GGUF]
    else:
        made = [safetensors_spec(size, method) for method in _COARSER_SAFETENSORS]
    yield from (one for one in made if one.weights_bytes < 0.95 * spec.weights_bytes)


def smallest_cards(question: Question, counts: tuple[int, ...]) -> str | None:
    """The least total memory in the catalogue that carries the load, with so many cards alike."""
    need = min(shape.spec.weights_bytes for shape in question.shapes)
    options = [(count * kind.memory_total_bytes, count, kind.aliases[0]) for kind in catalogue() for count in counts]
    for memory, count, name in sorted(options):
        if memory < need + GIB:
            continue
        asked = replace(question, machine=machine_of(f"{name} x{count}"), claimed={})
        if any(one.fits for one in ranked_candidates(asked, want_limits=False)):
            return f"{name} x{count}" if count > 1 else name
    return None
