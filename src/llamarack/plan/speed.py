"""How fast a placement will be: a roofline by matrix shape, measured all-reduce times, fixed times of the engine. Pure.

A matrix takes the longer of its bytes and its arithmetic at the shares a large matrix reaches, plus a fixed time per
kernel: small matrices are therefore less efficient, as the measured tables show. Two loads are known: a burst, in
which all requests arrive at once and first-token time is the median one's, and a closed loop, in which each client
sends its next request when the last is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, hypot

from llamarack.hardware.machine import Card, Machine
from llamarack.plan import llamacpp, vllm
from llamarack.plan.calibration import Calibration
from llamarack.plan.catalogue import find_card
from llamarack.plan.engine_data import data_file, version_key
from llamarack.plan.exchange import all_reduce_s
from llamarack.plan.record import Load, Predicted
from llamarack.plan.shape import ModelShape

_UNKNOWN = Predicted(first_token_s=None, per_token_s=None, tokens_per_s=None)
_QUANTIZED_PREFILL_BITS = 9  # weights of fewer bits go through llama.cpp's quantised kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One replica as the speed model sees it. `stages`: cards and share of layers of each pipeline stage, in order;
    within a stage the cards share every layer, equally or by `card_shares`. `is_eager`: the host launches every kernel.
    """

    engine: str
    stages: tuple[tuple[tuple[Card, ...], float], ...]
    batch_tokens: int
    kv_element_bytes: float
    engine_version: str | None = None
    card_shares: tuple[float, ...] | None = None
    is_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    bandwidth: float
    arithmetic: float
    llamacpp_arithmetic: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    engine: str
    version: str
    kernel_us: float
    layer_us: float
    attention_us: float
    step_us: float
    request_us: float
    first_fixed_ms: float
    first_request_ms: float
    clump: float
    closed_fixed_ms: float
    closed_request_ms: float


def predict(shape: ModelShape, placed: Placed, load: Load, streams: float) -> Predicted:
    """One replica with `streams` sequences at once; all None where a card's rates are not known."""
    times = _known_times(placed)
    if times is None:
        return _UNKNOWN
    prompt, output = lengths(load)
    step = decode_step_s(shape, placed, times, streams, prompt + output / 2)
    first = _first_token_s(shape, placed, times, streams, prompt)
    return _predicted(first, step, streams, output)


def predict_closed_loop(shape: ModelShape, placed: Placed, load: Load, streams: float) -> Predicted:
    """The same, once each of `streams` clients sends its next request when the last one is answered.

    Requests of equal length end together and come back together: `clump` is the share of the other streams whose
    prompts are computed with one's own. In a steady state each stream's tokens wait for the prompts of all the others,
    one each in the time of a whole answer, but not for those that were in one batch with its own. Where vLLM's steps
    hold few of the prompts, a prompt waits only for the step that runs and the one that is scheduled behind it.
    """
    times = _known_times(placed)
    if times is None:
        return _UNKNOWN
    prompt, output = lengths(load)
    decode = decode_step_s(shape, placed, times, streams, prompt + output / 2)
    together = 1 + times.clump * (streams - 1)
    prefill = _prefill_s(shape, placed, times, together, prompt)
    # llama.cpp computes prompts between two steps, and one that has begun must end first.
    waited = decode if placed.engine == "llamacpp" and streams > 1 else 0.0
    first = waited + prefill + _closed_host_s(times, streams)
    line = _VLLM_STEPS_TO_FIRST_TOKEN * max(placed.batch_tokens / prompt, 1)
    if placed.engine == "vllm" and line < streams:
        steps = _prefill_s(shape, placed, times, line, prompt) + _VLLM_STEPS_TO_FIRST_TOKEN * decode
        first = min(first, steps + _closed_host_s(times, line))
    beside = max(min(together, placed.batch_tokens / prompt), 1)
    step = decode + max(streams - beside, 0) / output * prefill / together
    return _predicted(first, step, streams, output)


# Asynchronous scheduling: the step that runs, the one scheduled behind it, one's own. Seen with vLLM 0.25.1: 64 to 128
# streams of 1,024 tokens get their first token after 3 steps of 8,192 tokens and after 3.5 of 2,048.
_VLLM_STEPS_TO_FIRST_TOKEN = 3


def _closed_host_s(times: EngineTimes, requests: float) -> float:
    return (times.closed_fixed_ms + (requests - 1) * times.closed_request_ms) * 1e-3


def _known_times(placed: Placed) -> EngineTimes | None:
    """None where the engine was never measured or a card's rates are not known."""
    rates = [_rates(card) for cards, _ in placed.stages for card in cards]
    return engine_times(placed.engine, placed.engine_version) if rates and None not in rates else None


def _predicted(first_s: float, step_s: float, streams: float, output: int) -> Predicted:
    return Predicted(
        first_token_s=first_s,
        per_token_s=step_s,
        tokens_per_s=streams * output / (first_s + max(output - 1, 0) * step_s),
    )


def lengths(load: Load) -> tuple[int, int]:
    """Prompt and output tokens; what the load does not name is assumed, within the context."""
    assumed = data_file("speed.yaml")["lengths"]
    output = load.output_tokens or min(assumed["output_tokens"], max(load.context_tokens // 2, 1))
    prompt = load.input_tokens or min(assumed["input_tokens"], max(load.context_tokens - output, 1))
    return prompt, output


def calibrated(predicted: Predicted, calibration: Calibration | None) -> Predicted:
    if calibration is None or predicted.per_token_s is None:
        return predicted
    first, step = predicted.first_token_s, predicted.per_token_s
    return replace(
        predicted,
        first_token_s=first * calibration.first_token_factor if first is not None else None,
        per_token_s=step * calibration.per_token_factor,
        tokens_per_s=predicted.tokens_per_s / calibration.per_token_factor if predicted.tokens_per_s else None,
    )


def decode_step_s(shape: ModelShape, placed: Placed, times: EngineTimes, streams: float, context: float) -> float:
    """One token for each of `streams`. Stages follow one another; with several, streams are dealt over them."""
    stages = len(placed.stages)
    dealt = streams if placed.engine == "llamacpp" else max(streams / stages, 1.0)
    spent = [
        _stage_s(shape, placed, times, stage, tokens=dealt, streams=dealt, context=context) for stage in range(stages)
    ]
    turns = min(stages, max(streams / dealt, 1.0))
    cycle = max(sum(spent), turns * max(spent))
    if placed.is_eager:
        cycle = max(cycle, shape.spec.layers * data_file("speed.yaml")["eager_layer_us"] * 1e-6)
    return cycle + times.step_us * 1e-6 + streams * times.request_us * 1e-6


def _prefill_s(shape: ModelShape, placed: Placed, times: EngineTimes, prompts: float, prompt: int) -> float:
    """Prompts of `prompt` tokens each, together, in chunks of a batch."""
    tokens = prompts * prompt
    chunk = min(tokens, placed.batch_tokens)
    one = sum(
        _stage_s(shape, placed, times, stage, tokens=chunk, streams=chunk / prompt, context=prompt / 2)
        for stage in range(len(placed.stages))
    )
    return tokens / chunk * (one + times.step_us * 1e-6)


def _first_token_s(shape: ModelShape, placed: Placed, times: EngineTimes, streams: float, prompt: int) -> float:
    """The median request's: half of the chunks that all prompts make, then what each arrival costs the host."""
    chunks = ceil(streams * prompt / placed.batch_tokens)
    chunk_s = _prefill_s(shape, placed, times, min(streams, placed.batch_tokens / prompt), prompt)
    host = times.first_fixed_ms * 1e-3 + (streams - 1) * times.first_request_ms * 1e-3
    return ceil(chunks / 2) * chunk_s + host


def _stage_s(
    shape: ModelShape, placed: Placed, times: EngineTimes, stage: int, *, tokens: float, streams: float, context: float
) -> float:
    """All layers of one stage for a batch of `tokens`, of `streams` sequences that look back over `context` each."""
    spec = shape.spec
    cards, part = placed.stages[stage]
    layers = part * spec.layers
    shares = placed.card_shares or (1 / len(cards),) * len(cards)
    slowest = max(
        _card_s(shape, placed, times, card, share, tokens, streams, context)
        for card, share in zip(cards, shares, strict=True)
    )
    message = 2 * tokens * spec.hidden_size
    eager = placed.engine == "llamacpp" or placed.is_eager or tokens > _GRAPH_TOKENS
    seconds = layers * (slowest + 2 * all_reduce_s(cards, message, eager=eager))
    if stage == len(placed.stages) - 1:
        seconds += max(_head_s(shape, times, card, share, streams) for card, share in zip(cards, shares, strict=True))
    return seconds


_GRAPH_TOKENS = 512  # largest captured batch, vLLM 0.33.0


def _card_s(
    shape: ModelShape,
    placed: Placed,
    times: EngineTimes,
    card: Card,
    share: float,
    tokens: float,
    streams: float,
    context: float,
) -> float:
    """One layer on one card, which has `share` of it."""
    spec, rates = shape.spec, _rates(card)
    assert rates is not None  # `predict` answers with None before
    kv_heads = max(shape.kv_heads * share, 1.0)
    query = shape.query_heads * spec.head_size_k * share
    keys = kv_heads * (spec.head_size_k + spec.head_size_v)
    width = shape.feed_forward_size * share
    matrices = (
        spec.hidden_size * (query + keys),
        spec.hidden_size * query,
        2 * spec.hidden_size * width,
        spec.hidden_size * width,
    )
    weight_bytes = _weight_bytes(shape)
    seconds = sum(_matrix_s(placed.engine, rates, times, size, weight_bytes, tokens) for size in matrices)
    attention_share: float = data_file("speed.yaml")["attention_bandwidth"]
    attention = streams * context * keys * placed.kv_element_bytes / (attention_share * _bandwidth(card))
    if tokens > streams:
        # Scores and values of a prompt: arithmetic, at half the rate of a large matrix (causal, small tiles).
        attention = max(attention, 4 * query * tokens * context / (rates.arithmetic / 2))
    return seconds + attention + (times.attention_us + times.layer_us) * 1e-6


def _head_s(shape: ModelShape, times: EngineTimes, card: Card, share: float, rows: float) -> float:
    rates = _rates(card)
    assert rates is not None
    size = shape.spec.vocab_size * shape.spec.hidden_size
    return _matrix_s("head", rates, times, size * share, shape.head_bytes / size, rows)


def _matrix_s(engine: str, rates: _Card, times: EngineTimes, weights: float, weight_bytes: float, rows: float) -> float:
    arithmetic, unpack, slowdown = rates.arithmetic, 0.0, 1.0
    bits = weight_bytes * 8
    if engine == "llamacpp":
        constants = data_file("speed.yaml")
        arithmetic = rates.llamacpp_arithmetic
        if bits < _QUANTIZED_PREFILL_BITS:
            arithmetic *= constants["llamacpp_arithmetic"]["quantized_factor"]
            unpack = weights * constants["unpack_ps"][8 if bits > 6 else 4] * 1e-12
        few = constants["few_rows"]
        slower = few["quantized" if bits < _QUANTIZED_PREFILL_BITS else "unquantized"] - 1
        slowdown = 1 + slower * min(max(rows - 1, 0), few["rows"] - 1) / (few["rows"] - 1)
    reading = slowdown * hypot(weights * weight_bytes / rates.bandwidth, unpack)
    return max(reading, 2 * rows * weights / arithmetic) + times.kernel_us * 1e-6


def _weight_bytes(shape: ModelShape) -> float:
    """Bytes per weight of the layers' matrices."""
    weights = shape.decode_parameters - shape.spec.hidden_size * shape.spec.vocab_size
    return shape.layers_before_bytes[-1] / weights


def _bandwidth(card: Card) -> float:
    known = find_card(card.name)
    value = card.memory_bandwidth_bytes_per_s or (known.memory_bandwidth_bytes_per_s if known else None)
    assert value is not None  # `_rates` was asked before
    return value


def device_limits(machine: Machine, cards: Sequence[int | str]) -> tuple[float | None, float | None]:
    """Bytes and fp16 operations per second of the slowest of these cards, by their data sheets; without cards those of
    the host, whose arithmetic is not known.
    """
    if not cards:
        return machine.host.memory_bandwidth_bytes_per_s, None
    found = [card for card in machine.cards if card.uuid in cards or card.index in cards]
    known = [(card, find_card(card.name)) for card in found]
    bandwidths = [
        card.memory_bandwidth_bytes_per_s or (kind.memory_bandwidth_bytes_per_s if kind else None)
        for card, kind in known
    ]
    flops = [card.fp16_flops_per_s or (kind.fp16_flops_per_s if kind else None) for card, kind in known]
    return _slowest(bandwidths), _slowest(flops)


def _slowest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def kv_bytes_per_token(shape: ModelShape, engine: str, kv_dtype: str) -> float:
    """Of one sequence, all layers."""
    return shape.kv_elements_before[-1] * kv_element_bytes(engine, kv_dtype)


def kv_element_bytes(engine: str, kv_dtype: str) -> float:
    table = vllm.KV_ELEMENT_BYTES if engine == "vllm" else llamacpp.KV_ELEMENT_BYTES
    return table.get(kv_dtype, 2.0)


@cache
def engine_times(engine: str, version: str | None) -> EngineTimes | None:
    """Of `version`, else the nearest older one (the oldest if none is older); None: an engine never measured."""
    rows = [EngineTimes(**row) for row in data_file("speed.yaml")["engines"] if row["engine"] == engine]
    if not rows:
        return None
    rows.sort(key=lambda row: version_key(row.version))
    if version is None:
        return rows[-1]
    wanted = version_key(version)[-1:] if engine == "llamacpp" else version_key(version)
    older = [row for row in rows if version_key(row.version) <= wanted] or rows[:1]
    return older[-1]


@cache
def _efficiency(capability: tuple[int, int] | None) -> tuple[float, float, float]:
    constants = data_file("speed.yaml")
    key = f"{capability[0]}.{capability[1]}" if capability else "other"
    row = constants["efficiency"].get(key, constants["efficiency"]["other"])
    llamacpp = constants["llamacpp_arithmetic"].get(key, constants["llamacpp_arithmetic"]["other"])
    return row["bandwidth"], row["arithmetic"], llamacpp


def _rates(card: Card) -> _Card | None:
    """Bytes and operations per second that a large matrix reaches; None where the card is not known."""
    known = find_card(card.name)
    bandwidth = card.memory_bandwidth_bytes_per_s or (known.memory_bandwidth_bytes_per_s if known else None)
    flops = card.fp16_flops_per_s or (known.fp16_flops_per_s if known else None)
    if bandwidth is None or flops is None:
        return None
    bandwidth_share, arithmetic_share, llamacpp_share = _efficiency(
        card.compute_capability or (known.compute_capability if known else None)
    )
    return _Card(
        bandwidth=bandwidth * bandwidth_share,
        arithmetic=flops * arithmetic_share,
        llamacpp_arithmetic=flops * llamacpp_share,
    )
