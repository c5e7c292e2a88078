"""What llama.cpp will hold on each device, by term. Pure.

Sources: the layer assignment, KV layout and pipeline copies are read in llama.cpp b11434 (`src/llama-model.cpp`,
`src/llama-kv-cache.cpp`, `src/llama-context.cpp`); the compute buffer follows laws fitted to that build's own dry runs
(data/llamacpp.yaml names them, with builds).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from llamarack.errors import ConfigError
from llamarack.plan.engine_data import ComputeLaw
from llamarack.plan.shape import ModelShape
from llamarack.units import KIB

MICRO_BATCH_TOKENS = 512  # n_ubatch, common/common.h b11434
BATCH_TOKENS = 2048  # n_batch, same
_CELL_PADDING = 256  # n_ctx is padded to this, llama-context.cpp b11434
# Bytes per element of a KV type: block bytes / block elements, ggml-common.h b11434.
KV_ELEMENT_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0,
    "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32,
}  # fmt: skip
_QUANTIZED_KV = {"q8_0", "q5_1", "q5_0", "q4_1", "q4_0"}
_QUANTIZED_KV_BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What of llama.cpp's options moves memory.

    `context_tokens`: of one sequence; with `kv_unified` it is also the pool that all sequences share.
    """

    sequences: int
    context_tokens: int
    kv_dtype: str = "f16"
    kv_unified: bool = False
    batch_tokens: int = BATCH_TOKENS
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    split_mode: str = "layer"
    flash_attention: bool = True
    gpu_layers: int | None = None  # None: all

    @property
    def stream_cells(self) -> int:
        """KV cells one attention step looks over: one sequence's, or the whole shared pool."""
        return -(-self.context_tokens // _CELL_PADDING) * _CELL_PADDING

    @property
    def total_cells(self) -> int:
        return self.stream_cells * (1 if self.kv_unified else self.sequences)

    @property
    def step_tokens(self) -> int:
        return min(self.micro_batch_tokens, self.batch_tokens)

    @property
    def outputs(self) -> int:
        """A server wants one row of logits per running sequence (`n_outputs_max`, tools/server, b11434)."""
        return min(self.batch_tokens, self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """What one device holds. `compute_high_bytes`: with logits of every token, as the engine's own dry run assumes."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    compute_high_bytes: int


def kv_bytes(shape: ModelShape, settings: Settings, layers: range) -> int:
    elements = shape.kv_elements_before[layers.stop] - shape.kv_elements_before[layers.start]
    return round(settings.total_cells * elements * KV_ELEMENT_BYTES[settings.kv_dtype])


def check_kv_dtype(shape: ModelShape, kv_dtype: str) -> str:
    """The KV type llama.cpp will use. Raises ConfigError for one it does not have or cannot block."""
    name = "f16" if kv_dtype == "auto" else kv_dtype
    if name not in KV_ELEMENT_BYTES:
        raise ConfigError(f"`kv_dtype`: llamacpp has no `{name}`", hint="one of: " + ", ".join(KV_ELEMENT_BYTES))
    for size in (shape.spec.head_size_k, shape.spec.head_size_v):
        if name in _QUANTIZED_KV and size % _QUANTIZED_KV_BLOCK:
            raise ConfigError(
                f"`kv_dtype`: `{name}` needs a head size that divides by {_QUANTIZED_KV_BLOCK}, this model's is {size}",
                hint="kv_dtype: f16",
            )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one device stands among those that share a model by layers.

    `is_alone`: it has them all; `is_pipelined`: the engine keeps copies of inputs so that devices work at once.
    """

    is_first: bool = True
    is_last: bool = True
    is_alone: bool = True
    is_pipelined: bool = False


ALONE = Place()


def compute_bytes(shape: ModelShape, settings: Settings, law: ComputeLaw, *, outputs: int, place: Place = ALONE) -> int:
    """The compute buffer of one device.

    The mask (one 2-byte number per token and cell) plus the largest of: the feed-forward step, the logits, and with
    quantized KV an f16 copy of one layer's K and V of all sequences. Pipelined layers keep `pipeline_copies` of mask
    and inputs.
    """
    spec = shape.spec
    batch, cells, hidden = settings.step_tokens, settings.stream_cells, spec.hidden_size
    row = 4 * batch * hidden
    wide = 4 * batch * 3 * shape.feed_forward_size
    is_quantized = settings.kv_dtype in _QUANTIZED_KV
    fixed = law.token_bytes * batch + (law.quantized_kv_kib * KIB if is_quantized else 0)
    wants_all = outputs >= batch
    rows, logit_rows = _hidden_rows(law, place, is_quantized=is_quantized, wants_all=wants_all)
    feed_forward = wide + rows * row
    wanted = 4 * outputs * (spec.vocab_size + (0 if place.is_alone else 2 * hidden))
    logits = wanted + logit_rows * row if place.is_last else 0
    if not settings.flash_attention:
        attention = batch * cells * 4 * shape.query_heads + 4 * batch * (
            law.attention_hidden * hidden + 2 * shape.kv_heads * spec.head_size_k
        )
        return max(4 * batch * cells + attention, 10 * batch * cells + max(feed_forward, logits)) + fixed
    peaks = [feed_forward, logits]
    if is_quantized and law.quantized_kv_copy:
        copy = 2 * settings.total_cells * shape.kv_heads * (spec.head_size_k + spec.head_size_v)
        peaks.append(copy + (law.quantized_kv_hidden + max(rows - law.feed_forward_hidden, 0)) * row)
    mask = 2 * batch * cells * (law.pipeline_copies if place.is_pipelined else 1)
    return mask + max(peaks) + fixed


def _hidden_rows(law: ComputeLaw, place: Place, *, is_quantized: bool, wants_all: bool) -> tuple[int, int]:
    """Activations of the hidden size that live at once, in the feed-forward step and at the logits.

    `wants_all`: logits of every token, as in the dry run; a server wants those of each sequence's last token.
    """
    if place.is_alone:
        return law.feed_forward_hidden, law.logits_hidden
    if not place.is_pipelined:
        return law.split_hidden + (wants_all and not place.is_first), law.split_logits_hidden
    rows = law.pipeline_all_hidden if wants_all else law.pipeline_hidden
    logit_rows = law.pipeline_all_logits_hidden if wants_all else law.pipeline_logits_hidden
    if place.is_first:
        logit_rows += law.pipeline_first_hidden - rows
        rows = law.pipeline_first_hidden
    # A quantised cache takes K and V at once, so one copy less waits; the last device keeps it where all are wanted.
    return rows - (is_quantized and not (wants_all and place.is_last)), logit_rows


def high_compute_bytes(shape: ModelShape, settings: Settings, law: ComputeLaw, place: Place = ALONE) -> int:
    """The upper end: logits of every token, and the gaps that the engine's allocator was seen to leave."""
    high = compute_bytes(shape, settings, law, outputs=settings.step_tokens, place=place)
    spec, batch = shape.spec, settings.step_tokens
    mask = 2 * batch * settings.stream_cells
    row = 4 * batch * spec.hidden_size
    if not law.has_gaps or not row <= mask <= 4 * row:  # masks of 1, 2 and 4 rows' size left them, 0.5 and 8 did not
        return high
    gapped = max(
        4 * batch * 4 * shape.feed_forward_size + 3 * row,
        4 * batch * spec.vocab_size + (law.logits_hidden + 1) * row,
    )
    return max(high, mask + gapped + law.token_bytes * batch)


def host_compute_bytes(shape: ModelShape, settings: Settings, law: ComputeLaw, *, is_pipelined: bool) -> int:
    """What the host computes in beside devices that hold all layers: the inputs, with their copies."""
    copies, rows = (law.pipeline_copies, law.pipeline_host_hidden) if is_pipelined else (1, law.host_hidden)
    batch = settings.step_tokens
    return 2 * copies * batch * settings.stream_cells + 4 * batch * rows * shape.spec.hidden_size


def assign_layers(layers: int, shares: Sequence[float], gpu_layers: int | None = None) -> tuple[int, ...]:
    """Device of each layer and, last, of the output head; -1 is the CPU.

    llama.cpp: cumulative normalised shares; layer i of the offloaded ones goes to the first device whose
    cumulative share is above i / offloaded. The head counts as one more layer and is offloaded first.
    """
    wanted = layers + 1 if gpu_layers is None else min(gpu_layers, layers + 1)
    total = sum(shares)
    cumulative = [value / total for value in accumulate(shares)]
    first = layers + 1 - wanted
    last = len(shares) - 1
    return tuple(
        -1 if index < first else min(bisect_right(cumulative, (index - first) / wanted), last)
        for index in range(layers + 1)
    )


def on_cpu(shape: ModelShape, settings: Settings, law: ComputeLaw) -> DeviceLoad:
    spec = shape.spec
    output_rows = 4 * settings.outputs * spec.vocab_size  # the host copy of the logits
    return DeviceLoad(
        weights_bytes=shape.cpu_bytes,
        kv_bytes=kv_bytes(shape, settings, range(spec.layers)),
        compute_bytes=output_rows + compute_bytes(shape, settings, law, outputs=settings.outputs),
        compute_high_bytes=output_rows + high_compute_bytes(shape, settings, law),
    )


def on_cards(
    shape: ModelShape, settings: Settings, laws: Sequence[ComputeLaw], shares: Sequence[float]
) -> tuple[tuple[DeviceLoad, ...], int]:
    """What each card holds, in the order of `shares`, and what the host holds beside them, in bytes.

    `laws`: of each card's backend. `none` puts everything on the one card; `tensor` cuts every layer, but each card
    keeps a whole compute buffer.
    """
    if settings.split_mode == "tensor" and len(shares) > 1:
        return _by_tensor(shape, settings, laws, shares), shape.embedding_bytes
    devices = _assigned(shape.spec.layers, tuple(shares), settings.gpu_layers)
    head, layers = devices[-1], devices[:-1]
    used = sorted(set(devices) - {-1})
    is_pipelined = len(shares) > 1 and -1 not in devices
    loads = []
    for card, law in enumerate(laws):
        own = _span(layers, card)
        is_padded = law.backend == "cuda"
        before = shape.layers_before_padded_bytes if is_padded else shape.layers_before_bytes
        head_bytes = shape.head_padded_bytes if is_padded else shape.head_bytes
        place = Place(
            is_first=card in used[:1],
            is_last=card == head,
            is_alone=len(shares) == 1,
            is_pipelined=is_pipelined,
        )
        computes = card in used
        loads.append(
            DeviceLoad(
                weights_bytes=before[own.stop] - before[own.start] + (head_bytes if head == card else 0),
                kv_bytes=kv_bytes(shape, settings, own),
                compute_bytes=compute_bytes(shape, settings, law, outputs=settings.outputs, place=place)
                if computes
                else 0,
                compute_high_bytes=high_compute_bytes(shape, settings, law, place) if computes else 0,
            )
        )
    left = _span(layers, -1)
    host = shape.embedding_bytes + shape.layers_before_bytes[left.stop] + kv_bytes(shape, settings, left)
    return tuple(loads), host + (shape.head_bytes if head == -1 else 0)


@lru_cache(maxsize=4096)
def _assigned(layers: int, shares: tuple[float, ...], gpu_layers: int | None) -> tuple[int, ...]:
    return assign_layers(layers, shares, gpu_layers)


def _span(devices: tuple[int, ...], device: int) -> range:
    """The layers on one device; they are neighbours because shares are handed out in order."""
    start = bisect_left(devices, device)
    return range(start, bisect_right(devices, device))


def _by_tensor(
    shape: ModelShape, settings: Settings, laws: Sequence[ComputeLaw], shares: Sequence[float]
) -> tuple[DeviceLoad, ...]:
    """Heads and rows are cut in whole units, so a card can get up to one unit more than its share.

    The largest unit is a group of attention heads that share one KV head.
    """
    spec = shape.spec
    groups = shape.kv_heads
    total = sum(shares)
    cut = shape.layers_before_padded_bytes[-1] + shape.head_padded_bytes
    kv = kv_bytes(shape, settings, range(spec.layers))
    return tuple(
        DeviceLoad(
            weights_bytes=round(cut * share / total),
            kv_bytes=round(kv * units / groups),
            compute_bytes=compute_bytes(shape, settings, law, outputs=settings.outputs),
            # the engine rotates the odd unit over the layers: one layer's worth of it may be this card's
            compute_high_bytes=high_compute_bytes(shape, settings, law) + round(cut / groups / spec.layers),
        )
        for law, share, units in zip(laws, shares, _whole_units(groups, shares), strict=True)
    )


def _whole_units(units: int, shares: Sequence[float]) -> list[int]:
    total = sum(shares)
    edges = [int(units * value / total) for value in accumulate(shares)]
    edges[-1] = units
    return [edge - before for edge, before in zip(edges, [0, *edges[:-1]], strict=True)]
