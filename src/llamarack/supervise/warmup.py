"""Before traffic: a few tokens, then one answer that is judged, then one long prompt (docs/decisions/009).

The first request of an engine pays for lazily made buffers and compiled kernels (40 s against 1 s has been seen);
here nobody waits for it. An answer that is garbage means a broken split, tokenizer or template, and is refused.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Any

from llamarack.errors import NeverReady
from llamarack.supervise.engine_client import EngineClient, EngineRefused

_FIRST_TOKENS = 2  # a prompt and one step: both kinds of batch that an engine prepares for
_ANSWER_TOKENS = 64
_SYSTEM = "You are a helpful assistant."
# A sound model answers shortly and stops; one that cannot stop runs into the limit and is judged by all it wrote.
_QUESTION = "Name one colour."
# The likeliest answer first, since it is the shortest; small models loop in it, and one unlucky sample is no proof.
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "seed": 2},
)
_BASE_PROMPT = "The weather today is"  # for a model without a template
_LONG_TEXT = "The shipment left the harbour in the morning and reached the warehouse before the evening. "
# An answer shorter than this says too little to be judged by its repetition.
_JUDGED_WORDS = 24
_REPEATED_SHARE = 0.6
_UNREADABLE_SHARE = 0.2


def fault_of(text: str) -> str | None:
    """What is wrong with an answer, in words; None when it reads like language. Repetition alone is judged leniently:
    small models do loop."""
    if not text.strip():
        return "the answer is empty"
    unreadable = sum(
        1 for c in text if c == "\ufffd" or (unicodedata.category(c) in {"Cc", "Cn", "Co", "Cs"} and c not in "\n\r\t")
    )
    if unreadable / len(text) > _UNREADABLE_SHARE:
        return f"{100 * unreadable / len(text):.0f} % of the answer is unreadable"
    words = re.findall(r"\w+|[^\w\s]", text)
    if len(words) >= _JUDGED_WORDS:
        word, count = Counter(words).most_common(1)[0]
        if count / len(words) > _REPEATED_SHARE:
            return f"`{word}` makes up {100 * count / len(words):.0f} % of the answer"
    return None


async def warm_up(client: EngineClient, *, long_prompt_tokens: int | None, timeout_s: float, has_template: bool) -> str:
    """Runs the steps and returns the judged answer. `long_prompt_tokens`: None: without one.

    Raises NeverReady when the answer is garbage or refused, OSError or TimeoutError when the engine stops answering.
    """
    try:
        await client.complete("Hello", max_tokens=_FIRST_TOKENS, timeout_s=timeout_s, temperature=0)
        faults = []
        for sampling in _SAMPLINGS:
            answer = await _ask(client, timeout_s, has_template, sampling)
            fault = fault_of(answer)
            if fault is None:
                break
            faults.append((fault, answer))
        if len(faults) == len(_SAMPLINGS):
            raise NeverReady(
                f"the warm-up answer is garbage: {faults[0][0]}; it began with `{faults[0][1][:80]}`",
                hint="the tokenizer, the chat template or the split does not fit the weights: llamarack check FILE",
            )
        if long_prompt_tokens is not None:
            repeats = max(1, long_prompt_tokens // 18)  # about 18 tokens a sentence
            await client.complete(_LONG_TEXT * repeats, max_tokens=1, timeout_s=timeout_s, temperature=0)
        return answer.strip()
    except EngineRefused as error:
        raise NeverReady(f"the engine refused the warm-up request: {error}") from error


async def _ask(client: EngineClient, timeout_s: float, has_template: bool, sampling: dict[str, Any]) -> str:
    if not has_template:
        answer = await client.complete(_BASE_PROMPT, max_tokens=_ANSWER_TOKENS, timeout_s=timeout_s, **sampling)
    else:
        question = {"role": "user", "content": _QUESTION}
        try:
            messages = [{"role": "system", "content": _SYSTEM}, question]
            answer = await client.chat(messages, max_tokens=_ANSWER_TOKENS, timeout_s=timeout_s, **sampling)
        except EngineRefused:  # some templates know no system role
            answer = await client.chat([question], max_tokens=_ANSWER_TOKENS, timeout_s=timeout_s, **sampling)
    return answer.text
