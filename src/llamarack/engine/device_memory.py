"""An engine's own account of its memory beside the plan's, device by device and term by term. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llamarack.plan.record import CardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTerms:
    """`device`: the engine's name for it. `terms`: the plan's names (`weights_bytes`, ...); one that is missing is not
    told."""

    device: str
    terms: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TermCheck:
    """`error_fraction`: of the actual value; above zero where the plan was too high; None for a term that is zero."""

    device: str
    term: str
    predicted_bytes: int
    actual_bytes: int
    error_fraction: float | None


def term_checks(cards: Iterable[CardPlan], told: Iterable[DeviceTerms]) -> tuple[TermCheck, ...]:
    """Every term that the engine tells. Planned and told devices stand in the same order."""
    checks = []
    for card, device in zip(cards, told, strict=False):
        for term, actual in device.terms.items():
            planned: int = getattr(card.terms, term)
            checks.append(
                TermCheck(
                    device=device.device,
                    term=term,
                    predicted_bytes=planned,
                    actual_bytes=actual,
                    error_fraction=(planned - actual) / actual if actual else None,
                )
            )
    return tuple(checks)
