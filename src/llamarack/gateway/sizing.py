"""How many tokens one request will hold: a guess from its bytes, an exact count of the prompt only near a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarack.errors import ContextLengthExceeded, RequestError
from llamarack.gateway.body import Parsed
from llamarack.gateway.capacity import Pool
from llamarack.gateway.demand import Learned
from llamarack.gateway.tokens import tokenize
from llamarack.supervise.table import ModelRow, ReplicaRow

_COUNT_TIMEOUT_S = 2.0
# A prompt that may fill so much of the context, or of a shared cache, is counted: a wrong guess would cost a refusal
# late, or the pages of many others.
_NEAR_CONTEXT = 0.6
_NEAR_POOL = 0.25


@dataclass(slots=True, kw_only=True)
class Size:
    """`room_tokens`: what an exactly counted prompt leaves of the context; None where it was not counted."""

    tokens: int
    room_tokens: int | None = None


def estimated(
    body_bytes: int,
    parsed: Parsed,
    model: ModelRow,
    rows: Sequence[ReplicaRow],
    learned: Learned,
    pools: Mapping[str, Pool],
) -> Size | None:
    """By experience; None for a prompt that must be counted."""
    guess = learned.prompt_tokens(body_bytes)
    output = _output(parsed, model, learned)
    if not rows:
        return Size(tokens=guess + output)
    context = _context(rows)
    if guess >= _NEAR_CONTEXT * context:
        return None
    pool = _smallest(rows, pools) if pools else None
    if pool is not None and guess >= _NEAR_POOL * pool:
        return None
    return Size(tokens=guess + output)


async def counted(
    body_bytes: int, parsed: Parsed, model: ModelRow, rows: Sequence[ReplicaRow], learned: Learned
) -> Size:
    """Raises ContextLengthExceeded for a prompt that leaves no token to generate: before it waits, and in the same
    words on every engine."""
    output, context = _output(parsed, model, learned), _context(rows)
    exact = await _counted(rows[0], parsed.value)
    if exact is None:
        return Size(tokens=min(learned.prompt_tokens(body_bytes), context) + output)
    if exact >= context:
        raise ContextLengthExceeded(
            f"the prompt has {exact} tokens, the context of `{parsed.model}` is {context} for prompt and output",
            param="messages" if parsed.shape == "chat" else "prompt",
        )
    return Size(tokens=exact + min(output, (context - exact) * parsed.choices), room_tokens=context - exact)


def _output(parsed: Parsed, model: ModelRow, learned: Learned) -> int:
    """Of all its choices."""
    cap = model.max_output_tokens
    limit = parsed.output_limit or model.defaults.max_tokens or cap
    if cap is not None and limit is not None and cap < limit:
        limit = cap
    return learned.output_tokens(limit) * parsed.choices


def _context(rows: Sequence[ReplicaRow]) -> int:
    return rows[0].context_tokens if len(rows) == 1 else max([row.context_tokens for row in rows])


def _smallest(rows: Sequence[ReplicaRow], pools: Mapping[str, Pool]) -> int | None:
    keys = [row.endpoint.key for row in rows if row.endpoint is not None]
    return min((pools[key].kv_tokens for key in keys if key in pools), default=None)


async def _counted(row: ReplicaRow, value: dict[str, Any]) -> int | None:
    """None where the engine does not tell in time; then it refuses by itself what is too long."""
    prompt = value.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return len(prompt)
    question: dict[str, Any] = {name: value[name] for name in ("messages", "prompt") if name in value}
    if not question or ("prompt" in question and not isinstance(prompt, str)):
        return None
    try:
        async with asyncio.timeout(_COUNT_TIMEOUT_S):
            count = (await tokenize(row, question))["count"]
    except (RequestError, TimeoutError, KeyError, TypeError):
        return None
    return count if isinstance(count, int) else None
