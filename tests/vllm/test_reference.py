"""The reference engine behind the gateway: ids and text are one prompt, streams say what answers say."""

from __future__ import annotations

import json
import math
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import all_ready, model

pytestmark = pytest.mark.vllm


def test_the_reference_answers_in_every_form(vllm_python: Path, tiny_model: Path, serve: Any) -> None:
    rack = serve(
        model("m", tiny_model, vllm_python, engine="transformers", engine_args={"dtype": "float32"}),
    )
    rack.wait_until(all_ready, "ready")
    ids = rack.post("/tokenize", {"model": "m", "prompt": "hello"})["tokens"]
    base = {"model": "m", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    by_text = rack.post("/v1/completions", base | {"prompt": "hello", "logprobs": 2, "prompt_logprobs": 1})
    by_ids = rack.post("/v1/completions", base | {"prompt": ids, "logprobs": 2, "prompt_logprobs": 1})
    choice = by_text["choices"][0]
    assert choice == by_ids["choices"][0]
    assert by_text["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 6, "total_tokens": len(ids) + 6}
    assert choice["prompt_logprobs"][0] is None
    assert [next(iter(entry)) for entry in choice["prompt_logprobs"][1:]] == [str(token) for token in ids[1:]]
    assert all(math.exp(value) <= 1 for value in choice["logprobs"]["token_logprobs"])
    named = rack.post("/v1/completions", base | {"prompt": ids, "logprobs": 2, "return_tokens_as_token_ids": True})
    told_by_id = named["choices"][0]["logprobs"]
    assert told_by_id["tokens"] == [f"token_id:{token}" for token in choice["logprobs"]["token_ids"]]
    assert told_by_id["token_logprobs"] == choice["logprobs"]["token_logprobs"]
    # What it generated has, as a prompt, the same log-probabilities: cache and whole pass agree.
    generated = choice["logprobs"]["token_ids"]
    whole = base | {"prompt": ids + generated, "max_tokens": 1, "prompt_logprobs": 0}
    told = rack.post("/v1/completions", whole)["choices"][0]["prompt_logprobs"][-len(generated) :]
    again = [entry[str(token)]["logprob"] for entry, token in zip(told, generated, strict=True)]
    assert again == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    events = list(rack.stream("/v1/completions", base | {"prompt": "hello"}))
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"] for event in events[:-1]]
    assert "".join(choices[0]["text"] for choices in pieces if choices) == choice["text"]
    talk = base | {"messages": [{"role": "user", "content": "hi"}]}
    assert rack.post("/v1/chat/completions", talk)["choices"][0]["finish_reason"] == "length"
    with pytest.raises(urllib.error.HTTPError) as refused:
        rack.post("/v1/completions", base | {"prompt": "hello", "max_tokens": 5000})
    assert refused.value.code == 400
    refused.value.close()
