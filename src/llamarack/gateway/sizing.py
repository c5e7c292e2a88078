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


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`room_tokens`: what an exactly counted prompt leaves of the context; None where it was not counted."""

    tokens: int
    room_tokens: int | None = None


async def sized(
    raw: bytes,
    parsed: Parsed,
    model: ModelRow,
    rows: Sequence[ReplicaRow],
    learned: Learned,
    pools: Mapping[str, Pool],
) -> Size:
    """Raises ContextLengthExceeded for a prompt that leaves no token to generate: before it waits, and in the same
    words on every engine."""
    guess = learned.prompt_tokens(len(raw))
    limit = parsed.output_limit or model.defaults.max_tokens or model.max_output_tokens
    if model.max_output_tokens is not None and limit is not None:
        limit = min(limit, model.max_output_tokens)
    output = learned.output_tokens(limit) * parsed.choices
    if not rows:
        return Size(tokens=guess + output)
    context = max([row.context_tokens for row in rows])
    pool = _smallest(rows, pools) if pools else None
    near = guess >= _NEAR_CONTEXT * context or (pool is not None and guess >= _NEAR_POOL * pool)
    exact = await _counted(rows[0], parsed.value) if near else None
    if exact is None:
        return Size(tokens=min(guess, context) + output)
    if exact >= context:
        raise ContextLengthExceeded(
            f"the prompt has {exact} tokens, the context of `{parsed.model}` is {context} for prompt and output",
            param="messages" if parsed.shape == "chat" else "prompt",
        )
    return Size(tokens=exact + min(output, (context - exact) * parsed.choices), room_tokens=context - exact)


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
