"""Counters of this worker in Prometheus form, and the engines' own beside them, labelled by model and replica."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from llamarack.supervise.traffic import TrafficLog

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|Inf|NaN)"
# A line of any other form would make a scraper refuse the whole page.
_SAMPLE = re.compile(rf"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{{.*\}})?( {_NUMBER}(?: -?\d+)?)$")


class Count:
    """A counter with its labels. The library's own takes a lock and five calls for each step; here one loop counts.

    Neither has the time of its creation: that of a worker's start cannot be summed over workers."""

    __slots__ = ("_labelnames", "_name", "_text", "_values")

    def __init__(self, name: str, text: str, labels: list[str]) -> None:
        self._name = name
        self._text = text
        self._labelnames = labels
        self._values: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def family(self) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=self._labelnames)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Times:
    """A histogram by model, in seconds."""

    __slots__ = ("_bounds", "_models", "_name", "_text")
    _labelnames = ("model",)

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._models: dict[str, tuple[list[int], list[float]]] = {}  # counts of each bucket; their sum

    def observe(self, model: str, seconds: float) -> None:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = ([0] * (len(self._bounds) + 1), [0.0])
        known[0][bisect_left(self._bounds, seconds)] += 1
        known[1][0] += seconds

    def family(self) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        for model, (counts, (total,)) in self._models.items():
            so_far = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                so_far += count
                buckets.append((floatToGoString(bound), so_far))  # type: ignore[no-untyped-call]
            family.add_metric([model], buckets, sum_value=total)
        return family


class _Families(Collector):
    def __init__(self) -> None:
        self.each: list[Count | Times] = []

    def collect(self) -> Iterator[Metric]:
        for one in self.each:
            yield one.family()


class Metrics:
    """`counted`: what is summed over workers. `state`: what the asked worker tells for all of them."""

    def __init__(self) -> None:
        self.counted = CollectorRegistry()
        self._families = _Families()
        self.counted.register(self._families)
        self.traffic = TrafficLog()
        self.state = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered", ["model", "code"])
        self.cancelled = self._counter("requests_cancelled", "Requests whose client left before the end", ["model"])
        self.rejected = self._counter("requests_rejected", "Requests that the gateway refused", ["model", "reason"])
        self.retries = self._counter("retries", "Requests sent to another replica after an engine broke", ["model"])
        self.stuck = self._counter("requests_stuck", "Requests cancelled for want of progress", ["model"])
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, as engines count them", ["model"])
        self.generated_tokens = self._counter("generated_tokens", "Generated tokens, as engines count them", ["model"])
        self.key_tokens = self._counter("key_tokens", "Prompt and generated tokens by key", ["key", "model"])
        self.first_token = self._histogram("first_token_seconds", "Arrival to the first engine event of a stream")
        self.per_token = self._histogram(
            "per_token_seconds", "Mean time of a stream's tokens after the first", _TOKEN_BUCKETS_S
        )
        self.duration = self._histogram("request_seconds", "Arrival to the end of the answer")
        self.queue_wait = self._histogram("queue_seconds", "Wait for a free slot")
        self.in_flight = self._gauge("in_flight", "Requests at an engine now", ["replica"])
        self.queued = self._gauge("queued", "Requests waiting now", ["model"])
        self.ready = self._gauge("replica_ready", "1 while a replica takes traffic", ["model", "replica"])
        self.slots = self._gauge("slots", "Slots by what they do: idle, busy, stuck", ["model", "replica", "state"])
        self.overcommit = self._gauge(
            "kv_overcommit", "Tokens given away over tokens of the shared KV cache", ["model", "replica"]
        )

    def counted_text(self) -> str:
        return generate_latest(self.counted).decode()

    def state_text(self) -> str:
        return generate_latest(self.state).decode()

    def _counter(self, name: str, text: str, labels: list[str]) -> Count:
        made = Count(f"llamarack_{name}", text, labels)
        self._families.each.append(made)
        return made

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(f"llamarack_{name}", text, labels, registry=self.state)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _LATENCY_BUCKETS_S) -> Times:
        made = Times(f"llamarack_{name}", text, buckets)
        self._families.each.append(made)
        return made


def summed(texts: Sequence[str]) -> str:
    """The counters of several workers as one: each sample the sum of the samples of its name and labels."""
    if len(texts) == 1:
        return texts[0]
    comments: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
                continue
            name, _, value = line.rpartition(" ")
            into = samples.setdefault(family, {})
            into[name] = into.get(name, 0.0) + float(value)
    return "".join(
        line + "\n"
        for family, about in comments.items()
        for line in (*about, *(f"{name} {value}" for name, value in samples.get(family, {}).items()))
    )


def with_labels(engine_text: str, labels: Mapping[str, str]) -> dict[str, tuple[list[str], list[str]]]:
    """An engine's exposition by family: (comment lines, samples with `labels` added)."""
    extra = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    families: dict[str, tuple[list[str], list[str]]] = {}
    family = ""
    for line in engine_text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            family = line.split(" ", 3)[2]
            families.setdefault(family, ([], []))[0].append(line)
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, own, rest = match.groups()
        inside = f"{own[1:-1].rstrip(',')},{extra}" if own and own != "{}" else extra
        known = family if name.startswith(family) and family else name
        families.setdefault(known, ([], []))[1].append(f"{name}{{{inside}}}{rest}")
    return families


def merged(parts: Iterable[dict[str, tuple[list[str], list[str]]]]) -> str:
    """Several engines in one exposition: each family's comments once, then all its samples."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for part in parts:
        for name, (comments, samples) in part.items():
            known = families.setdefault(name, (comments, []))
            known[1].extend(samples)
    return "".join(line + "\n" for comments, samples in families.values() for line in (*comments, *samples))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
