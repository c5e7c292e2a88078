"""What to start after out of memory: one rung of a ladder at a time, every plan smaller than the one before. Pure.

The order is that of least harm: memory fraction (vLLM), batch, context, concurrency, a coarser quantisation. On the
coarser file context and concurrency may be halved once more. No plan comes twice, and the ladder has an end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamarack.config import Group
from llamarack.plan.record import Candidate

# Causes that less memory cures. `host_out_of_memory` only where the model lives in the host's RAM.
OUT_OF_MEMORY = frozenset({"out_of_memory", "kv_cache_too_small"})
_FRACTION_CEILING = 0.85  # 0.90, the default, becomes 0.85; 0.95 as well
_FRACTION_STEP = 0.05
_FRACTION_FLOOR = 0.30  # below, the weights of no model that was chosen for the card are left room
_SMALL_BATCH_TOKENS = 128
_LEAST_CONTEXT_TOKENS = 256
_ORDER = ("gpu_memory_fraction", "batch_tokens", "context_tokens", "sequences", "path")
# Where the cache got too little, a smaller fraction or batch would take away or change nothing.
_FIRST_FOR = {"kv_cache_too_small": "context_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One setting that was lowered; `was` and `becomes` as the deployment file would have them."""

    setting: str
    was: int | float | str
    becomes: int | float | str

    @property
    def words(self) -> str:
        return f"{self.setting} {_shown(self.was)} -> {_shown(self.becomes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """A plan to try: `group` and `path` instead of the ones that ran out, reached by `rung`."""

    rung: Rung
    group: Group
    path: Path


def smaller_plans(
    group: Group, path: Path, candidate: Candidate, *, taken: Sequence[Rung], fallbacks: Sequence[Path], cause: str
) -> Iterator[Smaller]:
    """What may be tried next, nearest first; each is one rung below the plan that ran out of memory.

    `group`, `path`, `candidate`: the plan that ran out. `taken`: the rungs that led to it, oldest first. `fallbacks`:
    coarser files, in order. Empty: the ladder has ended.
    """
    for setting in _settings_left(taken, cause):
        if setting == "path":
            found = _coarser(group, path, taken, fallbacks)
        else:
            found = _lower(setting, group, path, candidate)
        if found is not None:
            yield found


def _settings_left(taken: Sequence[Rung], cause: str) -> Sequence[str]:
    """After the last rung of this file; on a coarser file from the context on."""
    if not taken:
        return _ORDER[_ORDER.index(_FIRST_FOR.get(cause, _ORDER[0])) :]
    last = _place(taken[-1].setting)
    if last == len(_ORDER) - 1:
        return _ORDER[_ORDER.index("context_tokens") :]
    return _ORDER[max(last + 1, _ORDER.index(_FIRST_FOR.get(cause, _ORDER[0]))) :]


def _place(setting: str) -> int:
    return _ORDER.index("gpu_memory_fraction" if setting == "kv_cache_bytes" else setting)


def _lower(setting: str, group: Group, path: Path, candidate: Candidate) -> Smaller | None:
    limits = group.limits
    match setting:
        case "gpu_memory_fraction":
            return _less_of_the_card(group, path, candidate)
        case "batch_tokens":
            now = candidate.batch_tokens
            return _changed(group, path, setting, now, _SMALL_BATCH_TOKENS) if now > _SMALL_BATCH_TOKENS else None
        case "context_tokens":
            now = limits.context_tokens
            return _halved(group, path, setting, now) if now // 2 >= _LEAST_CONTEXT_TOKENS else None
        case _:
            return _halved(group, path, setting, limits.sequences) if limits.sequences > 1 else None


def _less_of_the_card(group: Group, path: Path, candidate: Candidate) -> Smaller | None:
    """vLLM on cards only. A cache of fixed size wins over the fraction, so it is the cache that shrinks, by as much."""
    now = candidate.gpu_memory_fraction
    if group.engine != "vllm" or now is None:
        return None
    cache = group.limits.kv_cache_bytes
    if cache != "auto":
        less = round(_FRACTION_STEP * min((card.memory_total_bytes for card in candidate.cards), default=0))
        return _changed(group, path, "kv_cache_bytes", cache, max(cache - less, cache // 2)) if less else None
    fraction = round(min(_FRACTION_CEILING, now - _FRACTION_STEP), 2)
    return _changed(group, path, "gpu_memory_fraction", now, fraction) if fraction >= _FRACTION_FLOOR else None


def _halved(group: Group, path: Path, setting: str, now: int) -> Smaller:
    """A cache of fixed size is for all sequences at full length, so half of either needs half of it."""
    cache = group.limits.kv_cache_bytes
    if cache != "auto":
        group = _with(group, kv_cache_bytes=max(1, cache // 2))
    return _changed(group, path, setting, now, now // 2)


def _coarser(group: Group, path: Path, taken: Sequence[Rung], fallbacks: Sequence[Path]) -> Smaller | None:
    used = {name for rung in taken for name in (rung.was, rung.becomes)} | {str(path)}
    coarser = next((fallback for fallback in fallbacks if str(fallback) not in used), None)
    if coarser is None:
        return None
    return Smaller(rung=Rung(setting="path", was=str(path), becomes=str(coarser)), group=group, path=coarser)


def _changed(group: Group, path: Path, setting: str, was: int | float, becomes: int | float) -> Smaller:
    rung = Rung(setting=setting, was=was, becomes=becomes)
    return Smaller(rung=rung, group=_with(group, **{setting: becomes}), path=path)


def _with(group: Group, **limits: Any) -> Group:
    return replace(group, limits=replace(group.limits, **limits))


def _shown(value: int | float | str) -> str:
    if isinstance(value, str):
        return Path(value).name
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
