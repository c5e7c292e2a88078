"""Passes over an endpoint: free-running, forced on given tokens, with load beside it, and the probes for a diagnosis.

A forced pass lets the model run on from the prompt while it says what the reference said, and is set back on the
reference's token wherever it does not: the positions are those of one-token steps over the growing prefix, at a
fraction of the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from llamarack.errors import UsageError
from llamarack.judge.asker import Asker
from llamarack.judge.observation import Observation, Position, Spoken
from llamarack.measure.prompts import Question

Progress = Callable[[str], None]
# Texts that tokenizers disagree about: scripts, digits, runs of spaces, code, accents, emoji, marks of templates.
TOKENIZED_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "采购合同约定货到验收合格后30日内付款。",
    "1234567890 3.14159 $1,000,000",
    "  two  spaces,\ttabs\n\nand lines",
    "def f(x):\n    return {'a': x ** 2}",
    "naïve café Straße Ελλάδα привет",
    "👩‍💻🙂 ✓",
    "[INST] Hello [/INST] <|im_start|>user",
)
# Lengths of the prefixes whose next token is asked for. At length 1 a token sees only itself, so attention has no
# choice and positions no effect; what is wrong with either grows from there.
PREFIX_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_PREFIX_TEXTS = 3
# The same token throughout: all values are equal, so attention's weights, and with them positions, queries and keys,
# cannot matter at any length.
UNIFORM_TOKENS = 16
_LOAD_TOKENS = 64
_RECOMPUTED_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedText:
    """None: the endpoint does not tokenize."""

    text: str
    plain_ids: tuple[int, ...] | None
    special_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken:
    """What the model says after a prefix. `kind`: `prefix` (of a text) or `uniform` (one token throughout)."""

    kind: str
    ids: tuple[int, ...]
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """`template_ids`: of one short question, with the endpoint's template."""

    texts: tuple[TokenizedText, ...]
    template_ids: tuple[int, ...] | None
    template_text: str | None
    next_tokens: tuple[NextToken, ...]


async def free_run(
    asker: Asker, questions: Sequence[Question], *, output_tokens: int, on_question: Progress
) -> tuple[Observation, ...]:
    """Greedy answers of at most `output_tokens`. Raises UsageError where the endpoint does not tokenize."""
    seen = []
    for question in questions:
        on_question(question.id)
        prompt = await asker.prompt_of(question.text)
        if prompt is None:
            raise UsageError(
                f"`{asker.client.target.url}` neither tokenizes nor renders its template",
                hint="--method text compares the answers alone",
            )
        seen.append(await _free_run_one(asker, question, prompt, output_tokens))
    return tuple(seen)


async def _free_run_one(asker: Asker, question: Question, prompt: tuple[int, ...], output_tokens: int) -> Observation:
    positions: list[Position] = []
    texts: list[str] = []
    while True:
        ids = prompt + tuple(one.token_id for one in positions)
        answer = await asker.generate(ids, max_tokens=output_tokens - len(positions))
        positions += answer.positions
        texts.append(answer.text)
        if answer.is_whole or len(positions) >= output_tokens:
            break
        positions.append(await asker.step(prompt + tuple(one.token_id for one in positions)))
        if len(positions) >= output_tokens:
            break
    finish_reason = answer.finish_reason if answer.is_whole else "length"
    ids = tuple(one.token_id for one in positions)
    spoken = ids
    if finish_reason == "stop" and len(positions) < output_tokens:
        end = await _end_position(asker, prompt + ids)
        positions += [end] if end is not None else []
        spoken = ids if end is not None else ids[:-1]
    text = texts[0] if len(texts) == 1 else await asker.text_of(spoken)
    return Observation(
        question_id=question.id,
        language=question.language,
        prompt_ids=prompt,
        positions=tuple(positions),
        text=text if text is not None else "".join(texts),
        finish_reason=finish_reason,
    )


async def _end_position(asker: Asker, ids: tuple[int, ...]) -> Position | None:
    """The end token's position after an answer that stopped; None where the answer's last token is it already."""
    again = await asker.generate(ids, max_tokens=1)
    if again.finish_reason != "stop":
        return None
    return again.positions[0] if again.positions else await asker.step(ids)


async def forced_run(
    asker: Asker,
    reference: Sequence[Observation],
    *,
    on_question: Progress,
    in_one_request: bool = False,
    is_recomputed: bool = False,
) -> tuple[Observation, ...]:
    """The reference's own tokens under this model. `in_one_request`: by prompt log-probabilities. `is_recomputed`:
    every few tokens the whole prefix is computed anew, in other batches than it was generated in: the same arithmetic
    in another order, which is what a noise floor is about.
    """
    seen = []
    for observed in reference:
        on_question(observed.question_id)
        if in_one_request:
            scored = await asker.score(observed.prompt_ids + observed.ids)
            positions = scored[len(observed.prompt_ids) - 1 :]
        else:
            most = _RECOMPUTED_TOKENS if is_recomputed else None
            positions = await forced_positions(asker, observed.prompt_ids, observed.ids, recompute_after=most)
        seen.append(
            Observation(
                question_id=observed.question_id,
                language=observed.language,
                prompt_ids=observed.prompt_ids,
                positions=positions,
                text=None,
                finish_reason=None,
            )
        )
    return tuple(seen)


async def forced_positions(
    asker: Asker, prompt: tuple[int, ...], ids: tuple[int, ...], *, recompute_after: int | None = None
) -> tuple[Position, ...]:
    """One position per token of `ids`. Runs ahead as far as it may hope for: all of it at first, one token after a
    difference, then twice as many each time it went well; with `recompute_after` never further than that, and every
    so many tokens from a prefix that is computed whole.
    """
    positions: list[Position] = []
    most = recompute_after or len(ids)
    ahead, due = most, 0
    while len(positions) < len(ids):
        done = len(positions)
        wanted = min(ahead, len(ids) - done)
        prefix = prompt + ids[:done]
        is_due = recompute_after is not None and done >= due
        due = done + most if is_due else due
        answer = await asker.generate(prefix, max_tokens=wanted, ignore_end=True, reuse=not is_due)
        told = answer.positions[:wanted]
        if not told:
            told = (await asker.step(prefix),)
        for position in told:
            token = ids[len(positions)]
            positions.append(Position(token_id=token, top=position.top))
            if position.token_id != token:
                break
        ahead = min(most, 2 * ahead) if len(positions) == done + wanted else 1
    return tuple(positions)


async def speak(
    asker: Asker, questions: Sequence[Question], *, output_tokens: int, on_question: Progress
) -> tuple[Spoken, ...]:
    """Answers alone, for an endpoint that gives nothing else."""
    seen = []
    for question in questions:
        on_question(question.id)
        answer = await asker.chat(question.text, max_tokens=output_tokens)
        choice = answer["choices"][0]
        seen.append(
            Spoken(
                question_id=question.id,
                language=question.language,
                text=str((choice.get("message") or {}).get("content") or ""),
                output_tokens=(answer.get("usage") or {}).get("completion_tokens"),
                finish_reason=choice.get("finish_reason"),
            )
        )
    return tuple(seen)


@contextlib.asynccontextmanager
async def background_load(asker: Asker, questions: Sequence[Question], *, streams: int) -> AsyncIterator[None]:
    """`streams` requests at once, of other prompts, as long as the block runs. Their failures are not ours to judge."""
    stopped = asyncio.Event()

    async def one(number: int) -> None:
        drawn = random.Random(number)
        while not stopped.is_set():
            body = {"messages": [{"role": "user", "content": drawn.choice(questions).text}], "temperature": 0}
            body |= {"model": asker.model, "max_tokens": _LOAD_TOKENS, "ignore_eos": True}
            try:
                answer = await asker.client.call("POST", "/v1/chat/completions", body, timeout_s=asker.timeout_s)
                if answer.status != 200:
                    await asyncio.sleep(0.2)
            except (OSError, TimeoutError):
                await asyncio.sleep(0.2)

    tasks = [asyncio.create_task(one(number)) for number in range(streams)]
    try:
        yield
    finally:
        stopped.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def probe(asker: Asker, *, prefixes: Sequence[tuple[int, ...]] | None = None) -> Probes:
    """`prefixes`: the reference's token ids, so that both sides are asked the same; None: this side's own."""
    texts = []
    for text in TOKENIZED_TEXTS:
        plain = await asker.tokens_of(text, add_special=False)
        special = await asker.tokens_of(text, add_special=True)
        texts.append(TokenizedText(text=text, plain_ids=plain, special_ids=special))
    template = await asker.prompt_of("Hello")
    if prefixes is None:
        prefixes = await _own_prefixes(asker)
    asked = [("prefix", ids) for ids in prefixes]
    asked += [("uniform", (ids[-1],) * UNIFORM_TOKENS) for ids in prefixes if len(ids) in (2, 8)]
    told = []
    for kind, ids in asked:
        told.append(NextToken(kind=kind, ids=ids, position=await asker.step(ids)))
    return Probes(
        texts=tuple(texts),
        template_ids=template,
        template_text=None if template is None else await asker.text_of(template),
        next_tokens=tuple(told),
    )


_LONG_TEXTS = (
    "The purchasing contract says that the supplier delivers the goods to the warehouse within thirty days after the "
    "order, that the buyer inspects them within five working days, and that payment is due when both sides have signed "
    "the record of acceptance. If the goods do not meet the agreed standard, the buyer may return them at the cost of "
    "the supplier and ask for a replacement.",
    "In the third quarter revenue grew by twelve percent while the operating cash flow turned negative. The finance "
    "team found that two old customers had not paid their invoices, that the stock of spare parts had doubled, and "
    "that a large advance had been paid to a supplier of steel. The board asked for a plan that brings the cash flow "
    "back within two quarters without cutting the budget of the service team.",
    "To change the filter, first switch the machine off and wait until the fan stands still. Open the cover on the "
    "left side, pull the old filter out, and clean the frame with a dry cloth. Put the new filter in with the arrow "
    "pointing to the motor, close the cover until it clicks, and hold the reset button for five seconds until the "
    "green light stays on and the message goes away.",
)


async def _own_prefixes(asker: Asker) -> list[tuple[int, ...]]:
    prefixes = []
    for text in _LONG_TEXTS[:_PREFIX_TEXTS]:
        ids = await asker.tokens_of(text, add_special=False) or ()
        prefixes += [ids[:length] for length in PREFIX_TOKENS if length <= len(ids)]
    return prefixes
