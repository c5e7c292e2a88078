"""The evidence question by question: where two answers part, and what is wrong with how they read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamarack.judge.collection import Collection
from llamarack.judge.divergence import Kind, first_divergence
from llamarack.judge.observation import Observation, Spoken
from llamarack.judge.reading import reading_faults
from llamarack.judge.verify_result import QuestionResult


def question_results(
    reference: Collection, candidate: Collection, forced: Sequence[Observation], tie_nats: float
) -> tuple[QuestionResult, ...]:
    shortest = min(reference.output_tokens, candidate.output_tokens)  # two saved runs may have been cut elsewhere
    own = {one.question_id: _cut(one, shortest) for one in candidate.greedy}
    under = {one.question_id: one for one in forced}
    results = []
    for ours in (_cut(one, shortest) for one in reference.greedy):
        theirs = own.get(ours.question_id)
        if theirs is None:
            continue
        # Another template makes another prompt: then the answers are judged as texts, and the place where they part
        # is where the candidate, made to read the reference's prompt, first wants another token.
        like = theirs if theirs.prompt_ids == ours.prompt_ids else _as_free(under[ours.question_id])
        found = first_divergence(ours, like, tie_nats=tie_nats)
        results.append(
            QuestionResult(
                question_id=ours.question_id,
                language=ours.language,
                is_equal=found.kind is Kind.NONE,
                divergence=found,
                reference_text=ours.text,
                candidate_text=theirs.text,
                faults=reading_faults(theirs.text or "", theirs.ids, ours.language),
                reference_faults=reading_faults(ours.text or "", ours.ids, ours.language),
            )
        )
    return tuple(results)


def _cut(observed: Observation, tokens: int) -> Observation:
    """Without what is behind the shorter run's limit."""
    return replace(observed, positions=observed.positions[:tokens])


def _as_free(forced: Observation) -> Observation:
    positions = []
    for position in forced.positions:
        positions.append(replace(position, token_id=position.best_id))
        if position.best_id != position.token_id:
            break
    return replace(forced, positions=tuple(positions))


def spoken_results(reference: Collection, candidate: Collection) -> tuple[QuestionResult, ...]:
    """Answers alone: equal, or not."""
    ours = {one.question_id: one for one in _texts(reference)}
    return tuple(
        QuestionResult(
            question_id=theirs.question_id,
            language=theirs.language,
            is_equal=theirs.text == ours[theirs.question_id].text,
            divergence=None,
            reference_text=ours[theirs.question_id].text,
            candidate_text=theirs.text,
            faults=reading_faults(theirs.text, (), theirs.language),
            reference_faults=reading_faults(ours[theirs.question_id].text, (), theirs.language),
        )
        for theirs in _texts(candidate)
        if theirs.question_id in ours
    )


def _texts(collection: Collection) -> tuple[Spoken, ...]:
    if collection.is_text_only:
        return collection.spoken.get("alone", ())
    return tuple(
        Spoken(
            question_id=one.question_id,
            language=one.language,
            text=one.text or "",
            output_tokens=len(one.ids),
            finish_reason=one.finish_reason,
        )
        for one in collection.greedy
    )
