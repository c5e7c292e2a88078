"""Observations for tests, from full distributions that the test knows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llamarack.judge.observation import Observation, Position, Ranked

PROMPT = (1, 2, 3)


def position(token_id: int, probabilities: dict[int, float], *, top: int = 20) -> Position:
    """The `top` most likely tokens of a distribution, as a server tells them."""
    ranked = sorted(probabilities.items(), key=lambda one: (-one[1], one[0]))[:top]
    return Position(token_id=token_id, top=tuple(Ranked(token, math.log(p)) for token, p in ranked))


def sure(token_id: int, *, second: int = 99, margin: float = 2.0) -> Position:
    """Two tokens, `margin` nats apart."""
    best = 1 / (1 + math.exp(-margin))
    return position(token_id, {token_id: best, second: 1 - best})


def observed(
    positions: Sequence[Position], *, text: str | None = "An answer.", question_id: str = "q", language: str = "en"
) -> Observation:
    return Observation(
        question_id=question_id,
        language=language,
        prompt_ids=PROMPT,
        positions=tuple(positions),
        text=text,
        finish_reason="length",
    )
