"""How fast llama.cpp will be on the processor: memory or arithmetic, whichever takes longer. Pure.

One step of `rows` tokens reads all weights once, unpacks them once and multiplies them with every row; unpacking and
multiplying are shared by the threads. Times per weight were measured with one build on one processor (data/speed.yaml)
and hold for its instruction set; `bench FILE` corrects them for others by calibration. Memory is what `check` measured.

Unlike a card's burst the load is steady: while one answer is written the other streams' next prompts are read in
between, which on a processor is most of what a user waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarack.plan.engine_data import data_file
from llamarack.plan.record import Load, Predicted
from llamarack.plan.shape import ModelShape
from llamarack.plan.speed import lengths

_UNKNOWN = Predicted(first_token_s=None, per_token_s=None, tokens_per_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """Picoseconds of one thread per weight: `unpack_ps` once a step, `multiply_ps` once a row."""

    unpack_ps: float
    multiply_ps: float


def predict_cpu(
    shape: ModelShape,
    load: Load,
    streams: float,
    *,
    threads: int,
    bandwidth_bytes_per_s: float | None,
    kv_element_bytes: float,
) -> Predicted:
    """One replica with `streams` sequences at once; all None where the memory's speed was not measured."""
    if bandwidth_bytes_per_s is None:
        return _UNKNOWN
    prompt, output = lengths(load)
    constants = data_file("speed.yaml")["cpu"]
    layer_s = constants["layer_us"] * 1e-6 if threads > 1 else 0.0  # threads wait for each other at every layer
    step_fixed_s = constants["step_us"] * 1e-6
    attention_flop_per_s: float = constants["attention_flop_per_s"]
    weight = _weight(constants["weight_ps"], shape)

    def step_s(rows: float, heads: float, context: float, sequences: float) -> float:
        """`rows` tokens through the layers, `heads` of them through the output matrix."""
        head = shape.spec.hidden_size * shape.spec.vocab_size
        layers = shape.decode_parameters - head
        work = layers * (weight.unpack_ps + rows * weight.multiply_ps)
        work += head * (weight.unpack_ps + heads * weight.multiply_ps)
        cache_bytes = sequences * context * shape.kv_elements_before[-1] * kv_element_bytes
        scores = 4.0 * rows * context * shape.spec.layers * shape.query_heads * shape.spec.head_size_k
        arithmetic_s = (work * 1e-12 + scores / attention_flop_per_s) / threads
        memory_s = (shape.decode_bytes + cache_bytes) / bandwidth_bytes_per_s
        return float(max(arithmetic_s, memory_s) + shape.spec.layers * layer_s)

    prefill_s = step_s(prompt, 1, prompt / 2, 1)
    sampling_s = streams * constants["row_us"] * 1e-6  # by one thread of the replica
    decode_s = step_s(streams, streams, prompt + output / 2, streams) + step_fixed_s + sampling_s
    between_s = (streams - 1) * prefill_s / output
    per_token_s = decode_s + between_s
    # A prompt comes while another one is being read in as many cases as reading takes of all time.
    busy = min(1.0, (streams - 1) * prefill_s / (streams * prefill_s + output * decode_s))
    first_s = prefill_s * (1 + busy / 2) + decode_s
    return Predicted(
        first_token_s=first_s,
        per_token_s=per_token_s,
        tokens_per_s=streams * output / (first_s + max(output - 1, 0) * per_token_s),
    )


def _weight(by_bits: dict[int, list[float]], shape: ModelShape) -> _Weight:
    """Of the nearest measured width; Q4_1 has 5 bits, Q6_K 6.6, Q8_0 8.5."""
    bits = (
        8 * shape.layers_before_bytes[-1] / (shape.decode_parameters - shape.spec.hidden_size * shape.spec.vocab_size)
    )
    widths = sorted(by_bits)
    width = next((each for each in widths if bits <= each * 1.5), widths[-1])
    unpack_ps, multiply_ps = by_bits[width]
    return _Weight(unpack_ps=unpack_ps, multiply_ps=multiply_ps)
