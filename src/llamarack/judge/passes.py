"""The passes of one `verify`: what is collected from a reference, and what from a candidate.

Order: alone first, then again, then under load, so that nothing warm from a later pass helps an earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llamarack.judge.asker import Asker
from llamarack.judge.collect import background_load, forced_run, free_run, probe, speak
from llamarack.judge.collection import Collection, Side
from llamarack.judge.observation import Observation
from llamarack.measure.prompts import Question

OnStep = Callable[[str, str], None]  # pass, question
METHODS = ("steps", "prompt", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """`load_streams`: requests beside a loaded pass, 0: none. `method`: `steps` (along the answer), `prompt` (one
    request a question, by prompt_logprobs), `text` (answers alone).
    """

    questions: tuple[Question, ...]
    questions_name: str
    output_tokens: int
    top: int
    load_streams: int
    method: str


async def collect_reference(asker: Asker, side: Side, passes: Passes, on_step: OnStep) -> Collection:
    """Raises EngineError, UsageError."""
    collection = await _collect(asker, side, passes, on_step)
    if passes.method == "text":
        return collection
    passed = {
        "again": await forced_run(
            asker, collection.greedy, on_question=lambda q: on_step("again", q), is_recomputed=True
        )
    }
    if passes.load_streams:
        async with background_load(asker, passes.questions, streams=passes.load_streams):
            passed["loaded"] = await _forced(asker, collection, passes, lambda q: on_step("under load", q), steps=True)
    on_step("probes", "")
    return replace(collection, passes=passed, probes=await probe(asker))


async def collect_restarted(asker: Asker, reference: Collection, passes: Passes, on_step: OnStep) -> Collection:
    """The reference with one more pass, from an engine that was started anew."""
    if reference.is_text_only:
        return reference
    restarted = await _forced(asker, reference, passes, lambda q: on_step("after a restart", q))
    return replace(reference, passes={**reference.passes, "restarted": restarted})


async def collect_candidate(
    asker: Asker, side: Side, passes: Passes, reference: Collection, on_step: OnStep
) -> Collection:
    collection = await _collect(asker, side, passes, on_step)
    if passes.method == "text" or reference.is_text_only:
        return collection
    forced = {"alone": await _forced(asker, reference, passes, lambda q: on_step("forced", q))}
    if passes.load_streams:
        async with background_load(asker, passes.questions, streams=passes.load_streams):
            forced["loaded"] = await _forced(asker, reference, passes, lambda q: on_step("under load", q), steps=True)
    on_step("probes", "")
    asked = None if reference.probes is None else [n.ids for n in reference.probes.next_tokens if n.kind == "prefix"]
    return replace(collection, forced=forced, probes=await probe(asker, prefixes=asked))


async def _collect(asker: Asker, side: Side, passes: Passes, on_step: OnStep) -> Collection:
    empty = Collection(
        side=side,
        created_unix_s=time.time(),
        questions=passes.questions_name,
        output_tokens=passes.output_tokens,
        top=passes.top,
        method=passes.method,
    )

    def tell(question: str) -> None:
        on_step("answers", question)

    if passes.method == "text":
        spoken = await speak(asker, passes.questions, output_tokens=passes.output_tokens, on_question=tell)
        return replace(empty, spoken={"alone": spoken})
    greedy = await free_run(asker, passes.questions, output_tokens=passes.output_tokens, on_question=tell)
    return replace(empty, greedy=greedy)


async def _forced(
    asker: Asker, reference: Collection, passes: Passes, on_question: Callable[[str], None], *, steps: bool = False
) -> tuple[Observation, ...]:
    in_one = passes.method == "prompt" and not steps  # prompt log-probabilities never beside other requests
    return await forced_run(asker, reference.greedy, on_question=on_question, in_one_request=in_one)


def chosen_questions(sets: Sequence[tuple[Question, ...]], count: int | None) -> tuple[Question, ...]:
    """`count` of each set, from its start; None: all."""
    return tuple(question for each in sets for question in each[:count])
