"""Counters of this worker in Prometheus form, and the engines' own beside them, labelled by model and replica."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llamarack.supervise.traffic import TrafficLog

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|Inf|NaN)"
# A line of any other form would make a scraper refuse the whole page.
_SAMPLE = re.compile(rf"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{{.*\}})?( {_NUMBER}(?: -?\d+)?)$")

# They are times of a worker's start, which cannot be summed over workers.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """`counted`: what is summed over workers. `state`: what the asked worker tells for all of them."""

    def __init__(self) -> None:
        self.counted = CollectorRegistry()
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
        self._children: dict[tuple[Any, ...], Any] = {}

    def waited(self, model: str, seconds: float) -> None:
        self.child(self.queue_wait, model).observe(seconds)

    def child(self, family: Any, *labels: str) -> Any:
        """`family.labels(..)`, looked up once."""
        key = (family, *labels)
        known = self._children.get(key)
        if known is None:
            known = self._children[key] = family.labels(*labels)
        return known

    def counted_text(self) -> str:
        return generate_latest(self.counted).decode()

    def state_text(self) -> str:
        return generate_latest(self.state).decode()

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"llamarack_{name}", text, labels, registry=self.counted)

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(f"llamarack_{name}", text, labels, registry=self.state)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _LATENCY_BUCKETS_S) -> Histogram:
        return Histogram(f"llamarack_{name}", text, ["model"], registry=self.counted, buckets=buckets)


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
