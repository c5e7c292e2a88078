"""Asking a server what it accepts, and finding words that are one token each."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from llamarack.errors import EngineError, NothingRunning, UsageError
from llamarack.measure.calibrate import choose_counter, file_counter, one_token_words
from llamarack.measure.client import Client
from llamarack.measure.prompts import common_words
from llamarack.measure.server import Served, ask_server, request_body
from llamarack.measure.target import Endpoint, parse_target
from tests.measure.golden_server import GoldenServer, Script, models, no_wait, obedient_script, serving, steps
from tests.measure.test_client import FAULTS


async def ask(scripts, *, model: str | None = None, plain=None, then=None) -> Any:
    """Runs `ask_server` (and `then` with its answer) against a golden server."""
    server = GoldenServer(scripts=scripts, between=no_wait, plain=plain or {"/v1/models": lambda _: models("m")})
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with serving(server, listener) as port:
        client = Client(parse_target(f"http://127.0.0.1:{port}"))
        try:
            served = await ask_server(client, model=model, endpoint=Endpoint.CHAT)
            return served, server, await then(client, served) if then else None
        finally:
            client.close()


async def test_open_server_takes_every_extra_field() -> None:
    served, server, _ = await ask({"m": obedient_script})
    assert served.model == "m"
    assert served.extras == ("running counts", "fixed length", "no prompt cache")
    assert served.has_usage
    assert server.bodies[0]["min_tokens"] == server.bodies[0]["max_tokens"]


async def test_strict_server_loses_only_the_fields_that_it_refuses() -> None:
    def strict(body: dict[str, Any]) -> Script:
        if "ignore_eos" in body or "cache_prompt" in body:
            return Script(steps=steps(b'{"error": {"message": "unknown field"}}'), status=400)
        return obedient_script(body)

    served, _, _ = await ask({"m": strict})
    assert served.extras == ("running counts",)
    assert len(served.notes) == 2


async def test_server_that_refuses_everything_is_reported_in_its_own_words() -> None:
    refusal = Script(steps=steps(b'{"error": {"message": "no chat template"}}'), status=400)
    with pytest.raises(UsageError, match="no chat template"):
        await ask({"m": refusal})


async def test_server_that_fails_in_band_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="out of memory"):
        await ask({"m": FAULTS["in-band error"][1]})


@pytest.mark.parametrize(
    ("listed", "model", "match"),
    [(["a", "b"], None, "2 models"), ([], None, "0 models"), (["a", "b"], "c", "there are: a, b")],
)
async def test_model_that_cannot_be_chosen_names_the_choice(listed, model: str | None, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        await ask({}, model=model, plain={"/v1/models": lambda _: models(*listed)})


async def test_server_that_wants_a_key_says_so() -> None:
    with pytest.raises(UsageError, match="wants a key"):
        await ask({}, plain={"/v1/models": lambda _: (401, {})})


async def test_nothing_running_is_its_own_error() -> None:
    client = Client(parse_target("unix:///nonexistent/rack.sock"))
    with pytest.raises(NothingRunning):
        await ask_server(client, model=None, endpoint=Endpoint.CHAT)


def test_body_holds_only_the_fields_the_run_wants() -> None:
    served = Served(
        model="m", endpoint=Endpoint.COMPLETIONS, extras=("fixed length", "no prompt cache"), has_usage=True,
        round_trip_s=0.001, notes=(),
    )  # fmt: skip
    cold = orjson.loads(request_body(served, "x", output_tokens=9, is_fixed_length=True, is_cache_wanted=False))
    assert cold == {
        "model": "m", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
        "max_tokens": 9, "min_tokens": 9, "ignore_eos": True, "cache_prompt": False,
    }  # fmt: skip
    warm = orjson.loads(request_body(served, "x", output_tokens=9, is_fixed_length=False, is_cache_wanted=True))
    assert not {"min_tokens", "ignore_eos", "cache_prompt"} & set(warm)


LONG_WORDS = {"government", "technology", "time"}


def _costs(text: str) -> int:
    return 5 + sum(2 if word in LONG_WORDS else 1 for word in text.split())


async def test_words_of_two_tokens_are_found_and_dropped() -> None:
    async def count(text: str) -> int | None:
        return _costs(text)

    assert set(await one_token_words(count, common_words())) == set(common_words()) - LONG_WORDS


async def test_vocabulary_of_two_token_words_is_refused() -> None:
    async def count(text: str) -> int | None:
        return 2 * len(text.split())

    with pytest.raises(UsageError, match="0 of"):
        await one_token_words(count, common_words())


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ({"/tokenize": lambda body: (200, {"tokens": body["content"].split()})}, "the server's /tokenize"),
        ({"/tokenize": lambda _: (404, {})}, "the server's usage"),
    ],
)
async def test_counter_is_tokenize_where_there_is_one_else_usage(plain, expected: str) -> None:
    async def then(client: Client, served: Served) -> tuple[str, int | None]:
        name, counter = await choose_counter(client, served, None)
        return name, await counter("the time year")

    _, _, (name, tokens) = await ask(
        {"m": obedient_script}, plain={"/v1/models": lambda _: models("m"), **plain}, then=then
    )
    assert name == expected
    assert tokens == (3 if "tokenize" in expected else 8)  # usage bills the template too


async def test_tokenizer_file_counts_as_the_library_does(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"the": 0, "time": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert await file_counter(tmp_path / "tokenizer.json")("the time the") == 3
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        file_counter(tmp_path / "none.json")
