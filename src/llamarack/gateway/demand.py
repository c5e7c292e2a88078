"""What a request will take, before it runs: prompt tokens from its bytes, output tokens from those that came before.

An engine tells what a request really took when it ends; the newest of these correct the next guess. One `Learned` a
model, owned by its worker.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

# Tokens of a byte of request body before any was seen: English JSON has 0.25 to 0.3, Chinese under LLaMA-2 up to 0.6.
_FIRST_TOKENS_PER_BYTE = 0.4
# Output of a request that names no limit, before any was seen.
_FIRST_OUTPUT_TOKENS = 512
_WINDOW = 256
_FEWEST = 16  # below this many a 90th percentile is no more than the largest
_QUANTILE = 0.9
# Requests between two looks at the window: soon while it fills, and then before a quarter of it is new.
_EVERY, _EVERY_OF_FULL = 16, 64


@dataclass(slots=True, kw_only=True)
class Demand:
    """`caller`: whose key; the queue is fair between callers. `tokens`: prompt and output that it will hold in the KV
    cache at its end. `slots`: sequences at once, one for each choice of each prompt. `session`: what requests of one
    conversation have in common, or None."""

    caller: str = ""
    tokens: int = 1
    slots: int = 1
    session: bytes | None = None


@dataclass(slots=True)
class Learned:
    """The newest finished requests of one model."""

    _tokens_per_byte: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _output_tokens: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _rate: float = _FIRST_TOKENS_PER_BYTE
    _output: float | None = None
    _usual_s: float = 0.0
    _noted: int = 0

    def note(self, *, body_bytes: int, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        """`seconds`: from the engine's start to the answer, or to the first event of a stream."""
        if body_bytes > 0 and prompt_tokens > 0:
            self._tokens_per_byte.append(prompt_tokens / body_bytes)
        self._output_tokens.append(output_tokens)
        self._seconds.append(seconds)
        self._noted += 1
        if self._noted % (_EVERY if self._noted <= _WINDOW else _EVERY_OF_FULL) == 0:
            self._rate = quantile(self._tokens_per_byte, _QUANTILE, _FEWEST) or _FIRST_TOKENS_PER_BYTE
            self._output = quantile(self._output_tokens, _QUANTILE, _FEWEST)
            self._usual_s = quantile(self._seconds, 0.5, _FEWEST) or 0.0

    def prompt_tokens(self, body_bytes: int) -> int:
        """A guess on the high side."""
        return max(1, math.ceil(body_bytes * self._rate))

    def output_tokens(self, limit: int | None) -> int:
        """What nine of ten requests stay under, and never more than this one's own limit."""
        guess = _FIRST_OUTPUT_TOKENS if self._output is None else math.ceil(self._output)
        return max(1, guess if limit is None else min(limit, guess if self._output is not None else limit))

    @property
    def is_settled(self) -> bool:
        """Enough were seen for the output to be a guess from experience."""
        return self._output is not None

    @property
    def usual_s(self) -> float:
        """How long the engine takes; 0 while too few were seen."""
        return self._usual_s


def quantile(values: deque[float], share: float, fewest: int) -> float | None:
    """The value that `share` of them do not exceed; None for fewer than `fewest`."""
    if len(values) < fewest:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
