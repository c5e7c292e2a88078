"""What the server itself counted meanwhile: running, waiting, queued, KV use, preemptions, from its /metrics.

Client concurrency is not the engine's batch: only `running` proves that the batch was reached. Names are a table; sums
over replicas, except KV use, where the fullest replica counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from llamarack.measure.client import Client

INTERVAL_S = 1.0
_TIMEOUT_S = 5.0
# vLLM 0.6 to 0.11 and llama.cpp builds of 2024 to 2026; the gateway re-exports engine metrics under their own names
# and adds its own queue.
NAMES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "llamacpp:requests_processing", "llamarack_in_flight"),
    "waiting": ("vllm:num_requests_waiting", "llamacpp:requests_deferred"),
    "queued": ("llamarack_queued",),
    "kv_fraction": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "llamacpp:kv_cache_usage_ratio"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    # vLLM with --enable-mfu-metrics: its own estimate of the work of one card (vllm/v1/metrics/perf.py).
    "estimated_flop": ("vllm:estimated_flops_per_gpu_total", "vllm:estimated_flops_per_gpu"),
    "estimated_read_bytes": ("vllm:estimated_read_bytes_per_gpu_total", "vllm:estimated_read_bytes_per_gpu"),
    "estimated_write_bytes": ("vllm:estimated_write_bytes_per_gpu_total", "vllm:estimated_write_bytes_per_gpu"),
    "output_tokens": ("vllm:generation_tokens_total", "vllm:generation_tokens", "llamacpp:tokens_predicted_total"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """One reading; None: the server does not say. `waiting`: inside the engines; `queued`: before them."""

    at_monotonic_ns: int
    running: float | None
    waiting: float | None
    queued: float | None
    kv_fraction: float | None
    preemptions: float | None
    output_tokens: float | None
    estimated_flop: float | None = None
    estimated_read_bytes: float | None = None
    estimated_write_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """Of one point. `preemptions`, `output_tokens`: counted between the first and the last reading. `estimated_*`: what
    the engines themselves reckon to have done, per second between those, summed over replicas.
    """

    samples: int
    running_mean: float | None
    running_max: float | None
    waiting_mean: float | None
    waiting_max: float | None
    queued_max: float | None
    kv_fraction_max: float | None
    preemptions: float | None
    output_tokens: float | None
    estimated_flop_per_s: float | None = None
    estimated_read_bytes_per_s: float | None = None
    estimated_write_bytes_per_s: float | None = None


def parse_counters(text: str, at_monotonic_ns: int) -> CounterSample | None:
    """None where the text holds none of the known names."""
    values: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values.setdefault(sample.name, []).append(float(sample.value))
    except ValueError:
        return None
    found: dict[str, float | None] = {}
    for key, names in NAMES.items():
        known = next((values[name] for name in names if name in values), None)
        found[key] = None if known is None else max(known) if key == "kv_fraction" else sum(known)
    if all(value is None for value in found.values()):
        return None
    return CounterSample(at_monotonic_ns=at_monotonic_ns, **found)


def summarize_counters(samples: Sequence[CounterSample]) -> ServerCounters | None:
    if not samples:
        return None

    def known(name: str) -> list[float]:
        return [value for sample in samples if (value := getattr(sample, name)) is not None]

    def mean(name: str) -> float | None:
        values = known(name)
        return sum(values) / len(values) if values else None

    def increase(name: str) -> float | None:
        values = known(name)
        return values[-1] - values[0] if len(values) > 1 and values[-1] >= values[0] else None

    def rate(name: str) -> float | None:
        more, span_s = increase(name), (samples[-1].at_monotonic_ns - samples[0].at_monotonic_ns) * 1e-9
        return more / span_s if more is not None and span_s > 0 else None

    return ServerCounters(
        samples=len(samples),
        running_mean=mean("running"),
        running_max=max(known("running"), default=None),
        waiting_mean=mean("waiting"),
        waiting_max=max(known("waiting"), default=None),
        queued_max=max(known("queued"), default=None),
        kv_fraction_max=max(known("kv_fraction"), default=None),
        preemptions=increase("preemptions"),
        output_tokens=increase("output_tokens"),
        estimated_flop_per_s=rate("estimated_flop"),
        estimated_read_bytes_per_s=rate("estimated_read_bytes"),
        estimated_write_bytes_per_s=rate("estimated_write_bytes"),
    )


async def read_counters(client: Client) -> CounterSample | None:
    try:
        answer = await client.call("GET", "/metrics", timeout_s=_TIMEOUT_S)
    except (OSError, TimeoutError):
        return None
    if answer.status != 200:
        return None
    return parse_counters(answer.body.decode("utf-8", "replace"), time.monotonic_ns())


async def sample_counters(client: Client, samples: list[CounterSample]) -> None:
    """Appends one reading a second until cancelled; gives up at once where there is nothing to read."""
    while (sample := await read_counters(client)) is not None:
        samples.append(sample)
        await asyncio.sleep(INTERVAL_S)
