"""What is known of an engine's memory at a version. Reads the data files beside it once; unknown versions say so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from llamarack.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLaw:
    """Coefficients of the compute buffer of one llama.cpp build and backend. Names: see `llamacpp.compute_bytes`."""

    backend: str
    build: int
    feed_forward_hidden: int
    logits_hidden: int
    quantized_kv_hidden: int
    attention_hidden: int
    token_bytes: int
    quantized_kv_kib: int
    quantized_kv_copy: bool
    pipeline_copies: int = 4  # GGML_SCHED_MAX_COPIES
    # Hidden rows of a device among several, in all: without pipelining (some layers on the CPU) and with it.
    # `all`: with logits of every token, as dry runs have it.
    split_hidden: int = 2
    split_logits_hidden: int = 1
    pipeline_first_hidden: int = 16
    pipeline_hidden: int = 7
    pipeline_all_hidden: int = 11
    pipeline_logits_hidden: int = 4
    pipeline_all_logits_hidden: int = 7
    host_hidden: int = 4
    pipeline_host_hidden: int = 10
    has_gaps: bool = False  # the allocator was seen to leave some between mask and feed-forward step
    verified: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A quantity that is measured somewhere and bounded elsewhere."""

    low_bytes: int
    typical_bytes: int
    high_bytes: int
    measured: bool

    def plus(self, more_bytes: int, growth_bytes: int) -> Band:
        return Band(
            low_bytes=self.low_bytes + more_bytes,
            typical_bytes=self.typical_bytes + more_bytes,
            high_bytes=self.high_bytes + more_bytes + growth_bytes,
            measured=self.measured,
        )


@cache
def data_file(name: str) -> Any:
    text = files("llamarack.plan").joinpath("data", name).read_text(encoding="utf-8")
    # libyaml's parser where PyYAML was built with it: 1 ms a file instead of 10.
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def llamacpp_law(backend: str, build: int | None) -> ComputeLaw:
    """The law of `build`, else of the nearest older build (the oldest if none is older); None: the newest known."""
    laws = sorted(
        (ComputeLaw(**row) for row in data_file("llamacpp.yaml")["laws"] if row["backend"] == backend),
        key=lambda law: law.build,
    )
    if build is None:
        return laws[-1]
    older = [law for law in laws if law.build <= build] or laws[:1]
    law = older[-1]
    if law.build == build:
        return law
    return ComputeLaw(**{**{name: getattr(law, name) for name in ComputeLaw.__slots__}, "verified": False})


def llamacpp_unverified_bytes(compute_bytes: int) -> int:
    """What to add to the upper bound where the build's law was not verified."""
    rule = data_file("llamacpp.yaml")["unverified"]
    return int(max(compute_bytes * rule["compute_share"], rule["floor_mib"] * MIB))


def context_band(file: str, backend: str, *, card: str | None, driver: str | None, build: int | str | None) -> Band:
    """Memory beyond the itemised terms: the measured row of this card, driver and build, else the backend's band."""
    for row in data_file(file)["contexts"]:
        if row["backend"] != backend:
            continue
        if "card" in row and not (
            row["card"] == card and row["build"] == build and (driver or "").split(".")[0] == row["driver"]
        ):
            continue
        return Band(
            low_bytes=round(row["low_mib"] * MIB),
            typical_bytes=round(row.get("typical_mib", row["high_mib"]) * MIB),
            high_bytes=round(row["high_mib"] * MIB),
            measured="card" in row,
        )
    raise KeyError(backend)


def version_key(version: str) -> tuple[int, ...]:
    """`0.25.1` -> (0, 25, 1), for comparing."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0]))


def build_number(version: str | None) -> int | None:
    """`b11434`, `11434`, `2026.10.11549` (the wheel's last part is the build) -> the number; None if there is none."""
    numbers = re.findall(r"\d+", version or "")
    return int(numbers[-1]) if numbers else None
