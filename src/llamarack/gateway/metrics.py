"""Counters of this worker in Prometheus form, and the engines' own beside them, labelled by model and replica."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llamarack.supervise.traffic import TrafficLog

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|Inf|NaN)"
# A line of any other form would make a scraper refuse the whole page.
_SAMPLE = re.compile(rf"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{{.*\}})?( {_NUMBER}(?: -?\d+)?)$")


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.traffic = TrafficLog()
        self.requests = self._counter("requests", "Requests answered", ["model", "code"])
        self.cancelled = self._counter("requests_cancelled", "Requests whose client left before the end", ["model"])
        self.retries = self._counter("retries", "Requests sent to another replica after an engine broke", ["model"])
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, as engines count them", ["model"])
        self.generated_tokens = self._counter("generated_tokens", "Generated tokens, as engines count them", ["model"])
        self.first_token = self._histogram("first_token_seconds", "Arrival to the first engine event of a stream")
        self.per_token = Histogram("llamarack_per_token_seconds", "Mean time per token after the first, of a stream",
                                   ["model"], registry=self.registry, buckets=_PER_TOKEN_BUCKETS_S)  # fmt: skip
        self.duration = self._histogram("request_seconds", "Arrival to the end of the answer")
        self.queue_wait = self._histogram("queue_seconds", "Wait for a free slot")
        self.in_flight = Gauge("llamarack_in_flight", "Requests at an engine now", ["replica"], registry=self.registry)
        self.queued = Gauge("llamarack_queued", "Requests waiting now", ["model"], registry=self.registry)
        self.ready = Gauge("llamarack_replica_ready", "1 while a replica takes traffic", ["model", "replica"],
                           registry=self.registry)  # fmt: skip

    def own_text(self) -> str:
        return generate_latest(self.registry).decode()

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"llamarack_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"llamarack_{name}", text, ["model"], registry=self.registry, buckets=_LATENCY_BUCKETS_S)


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
