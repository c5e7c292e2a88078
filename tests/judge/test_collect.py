"""Running ahead gives what one-token steps give; what servers leave out is noticed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.errors import UsageError
from llamarack.judge.asker import Asker, Generated, read_positions
from llamarack.judge.collect import forced_positions, free_run
from llamarack.judge.observation import Position, Ranked
from llamarack.measure.client import Answer
from llamarack.measure.prompts import Question

PROMPT = (7, 8)


class Model:
    """A language model of eight tokens, a pure function of its prefix; it hides some tokens as llama.cpp hides those
    that end inside a character.
    """

    def __init__(self, seed: int, *, hidden: float = 0.0) -> None:
        self.seed = seed
        self.hidden = hidden
        self.requests = self.made = 0

    def next(self, ids: tuple[int, ...]) -> Position:
        drawn = random.Random(f"{self.seed}{ids}")
        top = sorted((Ranked(token, -drawn.random()) for token in range(8)), key=lambda one: -one.logprob)
        return Position(token_id=top[0].token_id, top=tuple(top))

    def is_hidden(self, ids: tuple[int, ...]) -> bool:
        return random.Random(f"hidden{ids}").random() < self.hidden

    async def generate(
        self, ids: tuple[int, ...], *, max_tokens: int, ignore_end: bool = False, reuse: bool = True
    ) -> Generated:
        self.requests += 1
        told: list[Position] = []
        self.made += max_tokens  # llama.cpp goes on behind what it hides
        for _ in range(max_tokens):
            position = self.next(ids)
            if self.is_hidden(ids):
                return Generated(positions=tuple(told), text="x", finish_reason="length", is_whole=False)
            told.append(position)
            ids = (*ids, position.token_id)
        return Generated(positions=tuple(told), text="x", finish_reason="length", is_whole=True)

    async def step(self, ids: tuple[int, ...]) -> Position:
        self.requests += 1
        return self.next(tuple(ids))

    async def prompt_of(self, question: str) -> tuple[int, ...]:
        return PROMPT

    async def text_of(self, ids: tuple[int, ...]) -> str:
        return "".join(map(str, ids))


def stepwise(model: Model, ids: tuple[int, ...]) -> list[tuple[int, tuple[Ranked, ...]]]:
    return [(token, model.next((*PROMPT, *ids[:place])).top) for place, token in enumerate(ids)]


@given(
    st.integers(0, 3), st.lists(st.integers(0, 7), min_size=1, max_size=24), st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([None, 1, 8]),
)  # fmt: skip
async def test_running_ahead_sees_what_one_token_steps_see(
    seed: int, forced: list[int], hidden: float, recompute_after: int | None
) -> None:
    model, ids = Model(seed, hidden=hidden), tuple(forced)
    positions = await forced_positions(model, PROMPT, ids, recompute_after=recompute_after)  # type: ignore[arg-type]
    assert [(one.token_id, one.top) for one in positions] == stepwise(model, ids)


async def test_model_that_agrees_is_asked_once() -> None:
    model = Model(1)
    own = tuple(one.token_id for one in (await model.generate(PROMPT, max_tokens=30)).positions)
    model.requests = 0
    await forced_positions(model, PROMPT, own)  # type: ignore[arg-type]
    assert model.requests == 1


async def test_requests_stay_below_one_a_token_where_it_differs() -> None:
    model = Model(2)
    ids = tuple(random.Random(0).randrange(8) for _ in range(40))
    await forced_positions(model, PROMPT, ids)  # type: ignore[arg-type]
    assert model.requests <= len(ids)


@pytest.mark.parametrize("hidden", [0.0, 0.4, 1.0])
async def test_free_run_has_every_token_also_the_hidden_ones(hidden: float) -> None:
    model = Model(3, hidden=hidden)
    question = Question(id="q", text="?", language="en")
    (seen,) = await free_run(model, [question], output_tokens=20, on_question=lambda _: None)  # type: ignore[arg-type]
    assert len(seen.ids) == 20
    assert [(one.token_id, one.top) for one in seen.positions] == stepwise(model, seen.ids)
    assert [position.best_id for position in seen.positions] == list(seen.ids)
    assert model.made <= 6 * 20  # what is generated behind a gap is for nothing: not all of the rest each time


def entry(token: int, text: bytes, *, own: bytes | None = None, logprob: float = -0.5) -> dict[str, Any]:
    """As llama.cpp b11549 writes one: `own` is the token's piece where the entry's text holds more."""
    piece = list(text if own is None else own)
    return {
        "id": token,
        "bytes": list(text),
        "logprob": logprob,
        "top_logprobs": [{"id": token, "bytes": piece, "logprob": logprob}, {"id": 99, "bytes": [65], "logprob": -2.5}],
    }


def test_llamacpp_entries_are_read_by_id() -> None:
    positions, has_gap = read_positions({"content": [entry(5, b" a"), entry(6, b" b", logprob=-1.0)]})
    assert not has_gap
    assert [one.token_id for one in positions] == [5, 6]
    assert positions[1].top == (Ranked(6, -1.0), Ranked(99, -2.5))


def test_entry_that_reads_as_more_than_its_piece_marks_a_gap_before_it() -> None:
    whole = "营".encode()
    positions, has_gap = read_positions({"content": [entry(5, b" a"), entry(6, whole, own=whole[2:]), entry(7, b"c")]})
    assert has_gap
    assert [one.token_id for one in positions] == [5]


def test_vllm_entries_are_read_by_token_id() -> None:
    logprobs = {
        "tokens": ["token_id:11", "token_id:12"],
        "token_logprobs": [-0.1, -3.0],
        "top_logprobs": [{"token_id:11": -0.1, "token_id:3": -2.4}, {"token_id:4": -0.2}],
    }
    positions, has_gap = read_positions(logprobs)
    assert not has_gap
    assert positions[1].token_id == 12
    assert positions[1].top == (Ranked(4, -0.2), Ranked(12, -3.0))  # the sampled one is told beside the best


@pytest.mark.parametrize(
    "logprobs",
    [
        {"tokens": [" a"], "token_logprobs": [-0.1], "top_logprobs": [{" a": -0.1}]},
        {"content": [{"token": " a", "logprob": -0.1}]},
    ],
)
def test_log_probabilities_without_ids_are_refused(logprobs: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no token ids") as caught:
        read_positions(logprobs)
    assert "--method text" in (caught.value.hint or "")


def test_answer_without_log_probabilities_has_no_positions() -> None:
    assert read_positions(None) == ((), False)


class Endpoint:
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def call(self, method: str, path: str, value: Any, *, timeout_s: float) -> Answer:
        self.bodies.append(value)
        return Answer(status=200, body=b'{"choices": [{"text": "", "logprobs": null}]}', elapsed_s=0.0)


async def test_prefix_that_shall_be_computed_anew_is_found_in_no_engines_cache() -> None:
    endpoint = Endpoint()
    asker = Asker(endpoint, "m", top=10, timeout_s=1.0)  # type: ignore[arg-type]
    for reuse in (True, False, False):
        await asker.generate(PROMPT, max_tokens=1, reuse=reuse)
    assert [body["cache_prompt"] for body in endpoint.bodies] == [True, False, False]  # llama.cpp
    salts = [body.get("cache_salt") for body in endpoint.bodies]  # vLLM
    assert salts[0] is None
    assert salts[1]
    assert salts[2] not in (None, salts[1])
