"""What a model said, position by position: the raw record that everything in `verify` is derived from. Pure.

A position is one token and the model's log-probabilities for it, in nats, given everything before. Servers tell only
the best few tokens (`top`); what is not told is not guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Ranked(NamedTuple):
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """`token_id`: the token at this place, chosen by the model or forced on it. `top`: its best tokens, best first."""

    token_id: int
    top: tuple[Ranked, ...]

    @property
    def best_id(self) -> int:
        return self.top[0].token_id

    @property
    def logprob(self) -> float | None:
        """Of `token_id`; None where it is not among the told ones."""
        return self.logprob_of(self.token_id)

    def logprob_of(self, token_id: int) -> float | None:
        return next((one.logprob for one in self.top if one.token_id == token_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One prompt and what followed. `finish_reason`: `stop` (its last position is the end token) or `length`.

    `text` is None for a forced pass: there the tokens are not the model's own.
    """

    question_id: str
    language: str | None
    prompt_ids: tuple[int, ...]
    positions: tuple[Position, ...]
    text: str | None
    finish_reason: str | None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(position.token_id for position in self.positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """An answer of an endpoint that gives neither token ids nor log-probabilities."""

    question_id: str
    language: str | None
    text: str
    output_tokens: int | None
    finish_reason: str | None
