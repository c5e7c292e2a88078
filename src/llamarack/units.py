"""Quantities: parsing what people type, printing what people read. The only place where units are converted.

Inside the program there are only bytes, seconds and tokens.
"""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_SIZE_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": TIB, "tib": TIB, "tb": 1000**4,
}  # fmt: skip
_DURATION_FACTORS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """`24GiB`, `80 GB`, `512M` or a bare number of bytes. Raises ValueError with the accepted forms."""
    return round(_quantity(text, _SIZE_FACTORS, "a size such as 24GiB, 512MiB or 1000000"))


def parse_duration_s(text: str) -> float:
    """`30s`, `500ms`, `5m`, `24h` or a bare number of seconds. Raises ValueError with the accepted forms."""
    return _quantity(text, _DURATION_FACTORS, "a duration such as 30s, 500ms, 5m or 24h")


def _quantity(text: str, factors: dict[str, float] | dict[str, int], expected: str) -> float:
    match = _QUANTITY.fullmatch(text)
    factor = factors.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"`{text}` is not {expected}")
    return float(match[1]) * factor


def format_bytes(count: float | None) -> str:
    """`12.3 GiB`; `–` for unknown."""
    if count is None:
        return "–"
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float | None) -> str:
    """`840 ms`, `1.24 s`, `3 min 05 s`, `2 h 10 min`; `–` for unknown."""
    if seconds is None:
        return "–"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1000:.0f} ms" if abs(seconds) >= 0.01 else f"{seconds * 1000:.2f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"


def format_count(count: float | None) -> str:
    """`131,072`; `–` for unknown."""
    return "–" if count is None else f"{count:,.0f}"


def format_rate(per_s: float | None, unit: str = "tokens/s") -> str:
    """`123.4 tokens/s`; `–` for unknown."""
    if per_s is None:
        return "–"
    return f"{per_s:,.0f} {unit}" if per_s >= 1000 else f"{per_s:.1f} {unit}"
