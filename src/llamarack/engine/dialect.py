"""How a running engine is spoken with and read: what the gateway knows of it, and nothing of how it is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an engine listens: a Unix socket, or a loopback port where it cannot. `key`: its bearer token."""

    socket: Path | None
    port: int | None
    key: str
    served_name: str  # the model id that the engine knows

    @property
    def base_url(self) -> str:
        return "http://engine" if self.socket else f"http://127.0.0.1:{self.port}"

    @property
    def shown(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.base_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What an engine says of its own work. `None`: it does not say. `steps`: rises with every step of the model, so
    that a long prompt being read is seen to move."""

    generated_tokens: int | None
    prompt_tokens: int | None
    running: int | None
    waiting: int | None
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUse:
    """A pool of KV cache that sequences share, as its engine tells it now. `preemptions`: since its start; `waiting`:
    in the engine's own queue; `page_tokens`: what a sequence takes at once. `None`: it does not say."""

    kv_tokens: int | None
    used_fraction: float | None
    preemptions: int | None
    waiting: int | None
    page_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviations:
    """Where an engine's stream differs from the wire rules; the gateway rewrites only what is named here.

    `error_prefixes`: events that begin so carry an error inside a 200 stream. `tokenizes_as_vllm`: /tokenize takes
    `prompt` or `messages` and /detokenize answers `prompt`; otherwise llama.cpp's `content`. `ignored_fields`: by path,
    what the engine drops without a word although it changes the answer, with the values that mean the same as leaving
    it out. `keeps_connections`: idle connections cost it no thread. `death_words`: in an error, they say
    that the engine behind the HTTP server is dead: the fault of no request. `ends_whole_answers`: one that is no stream
    is ended when its connection is closed, too.
    """

    error_prefixes: tuple[bytes, ...] = (b'data: {"error"', b"error: ")
    tokenizes_as_vllm: bool = False
    ignored_fields: Mapping[str, Mapping[str, tuple[object, ...]]] = field(default_factory=dict)
    keeps_connections: bool = False
    death_words: str | None = None
    ends_whole_answers: bool = True


class Dialect(Protocol):
    name: str
    deviations: Deviations

    def counters(self, metrics_text: str) -> Counters:
        """From the engine's own /metrics."""

    def kv_use(self, metrics_text: str) -> KvUse | None:
        """Of a pool that sequences share; None where each has a part of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """Names of the counters in an engine's /metrics; several where they moved between versions."""

    generated_tokens: tuple[str, ...] = ()
    prompt_tokens: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()


def number_of(text: str) -> float | None:
    """Of a sample; None for NaN and Inf too, which are numbers to Prometheus."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def read_counters(metrics_text: str, names: MetricNames) -> Counters:
    """Sums each counter over its label sets; None where no sample has any of its names, or none with a number."""
    totals: dict[str, float] = {}
    for line in metrics_text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        if (number := number_of(value)) is not None:
            totals[bare] = totals.get(bare, 0.0) + number

    def total(wanted: tuple[str, ...]) -> int | None:
        return next((int(totals[name]) for name in wanted if name in totals), None)

    return Counters(
        generated_tokens=total(names.generated_tokens),
        prompt_tokens=total(names.prompt_tokens),
        running=total(names.running),
        waiting=total(names.waiting),
        steps=total(names.steps),
    )
