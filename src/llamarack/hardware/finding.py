"""Record: one thing found, and its cure. Shared by the checks of machine and model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong or worth knowing, with what to do about it."""

    code: str
    severity: Severity
    subject: str
    seen: str
    why: str
    fix: str
