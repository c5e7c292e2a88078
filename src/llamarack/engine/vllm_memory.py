"""What a started vLLM says of its memory, rank by rank. Pure.

Lines: vLLM 0.25.1 to 0.33.0 (`v1/worker/gpu_worker.py`, `gpu_model_runner.py`, `cpu_worker.py`,
`v1/core/kv_cache_utils.py`). The value that the log suggests for `--kv-cache-memory` is not read: it counts graph
memory twice (vLLM issue 57936).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from llamarack.engine.device_memory import DeviceTerms
from llamarack.units import GIB

_RANK = re.compile(r"^\((?:Vllm)?Worker(?:Proc)?_?((?:[A-Z]+\d+_?)*) pid=\d+\)")
_GIB_LINES = {
    "weights_bytes": re.compile(r"Model loading took ([\d.]+) GiB"),
    "kv_bytes": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
    "graphs_bytes": re.compile(r"(?:CUDA graph pool memory: |Graph capturing finished .* took )([\d.]+) GiB"),
}
_CPU_KV = re.compile(r"(?:Explicitly|Auto) set \(([\d.]+)/[\d.]+\) GiB for KV cache")
_USAGE = re.compile(
    r"Actual usage is ([\d.]+) GiB for (?:consumed memory \(weights \+ non-torch\)|weight), "
    r"([\d.]+) GiB for peak activation"
)
_CAPACITY = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank; None: its log does not say. `rank`: vLLM's name for it (`TP1`, `PP0_TP1`), empty where there is one.

    `consumed_bytes`: weights and what torch does not manage; `compute_bytes`: the peak of one step.
    """

    rank: str
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    graphs_bytes: int | None = None
    compute_bytes: int | None = None
    consumed_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActualMemory:
    """`kv_tokens`: full-length sequences that the KV cache holds, in tokens; one number for all ranks."""

    ranks: tuple[RankMemory, ...] = ()
    kv_tokens: int | None = None
    full_sequences: float | None = None


def actual_memory(log_lines: Iterable[str]) -> ActualMemory:
    """Of the last start in the log."""
    ranks: dict[str, RankMemory] = {}
    kv_tokens: int | None = None
    full_sequences: float | None = None
    for line in log_lines:
        rank = _RANK.match(line)
        name = rank[1].strip("_") if rank else ""
        found = _terms_of(line)
        if found:
            ranks[name] = replace(ranks.get(name, RankMemory(rank=name)), **found)
        if match := _CAPACITY.search(line):
            kv_tokens = int(match[1].replace(",", ""))
        if match := _CONCURRENCY.search(line):
            full_sequences = float(match[2])
    in_order = tuple(ranks[name] for name in sorted(ranks, key=_rank_order))
    return ActualMemory(ranks=in_order, kv_tokens=kv_tokens, full_sequences=full_sequences)


def _terms_of(line: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for term, pattern in _GIB_LINES.items():
        if match := pattern.search(line):
            found[term] = _bytes(match[1])
    if match := _CPU_KV.search(line):
        found["kv_bytes"] = _bytes(match[1])
    if match := _USAGE.search(line):
        found |= {"consumed_bytes": _bytes(match[1]), "compute_bytes": _bytes(match[2])}
    return found


def _bytes(gib: str) -> int:
    return round(float(gib) * GIB)


def _rank_order(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))


def device_terms(log_lines: Iterable[str]) -> list[DeviceTerms]:
    """In the plan's terms. A single rank that the log does not name is `0`."""
    told = []
    for rank in actual_memory(log_lines).ranks:
        terms = {name: getattr(rank, name) for name in ("weights_bytes", "kv_bytes", "compute_bytes", "graphs_bytes")}
        known = {name: value for name, value in terms.items() if value is not None}
        told.append(DeviceTerms(device=rank.rank or "0", terms=known))
    return told
