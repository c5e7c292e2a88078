"""SmolLM2 cut into three against the same weights uncut; small models cut by tensor, by stage and copied."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import EAGER, Rack, all_ready, model

pytestmark = pytest.mark.vllm
_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is Madrid.",
    "Water boils at one hundred degrees Celsius at sea level, and it freezes at zero degrees.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))\n",
    "The invoice of 14 March lists twelve pallets of printer paper and three boxes of toner.",
)
# In float32 sums taken in another order move a log-probability by some 1e-5; a wrong cut moves it by whole units.
# (In bfloat16, whose logits near 20 are 0.125 apart, these texts gave 0.05 on average and 0.29 at worst.)
_SHARP = EAGER | {"dtype": "float32"}
_NOISE = 1e-3
_TIE = 1e-3


def test_three_ranks_and_the_reference_say_what_one_says(vllm_python: Path, smollm2: Path, serve: Any) -> None:
    plain = {"engine": "transformers", "engine_args": {"dtype": "float32"}}
    rack = serve(
        model("one", smollm2, vllm_python, engine_args=_SHARP),
        model("three", smollm2, vllm_python, tensor_parallel=3, engine_args=_SHARP),
        model("reference", smollm2, vllm_python, **plain),
    )
    replicas = rack.wait_until(all_ready, "ready")
    assert len(replicas["three-0"]["pids"]) >= 3 + 1
    for candidate in ("three", "reference"):
        rows = [row for text in _TEXTS for row in _compared(rack, candidate, text)]
        errors = [abs(one - other) for one, other, _, _ in rows]
        margins = [margin for _, _, is_same, margin in rows if not is_same]
        report = {"tokens": len(rows), "worst": max(errors), "mean": sum(errors) / len(rows)}
        print(json.dumps({"candidate": candidate} | report | {"margins_where_top1_differs": margins}))
        assert max(errors) < _NOISE
        assert all(margin < _TIE for margin in margins)
    question = {
        "model": "three",
        "temperature": 0,
        "max_tokens": 16,
        "messages": [_user("What is the capital of France?")],
    }
    events = list(rack.stream("/v1/chat/completions", question))
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"] for event in events[:-1]]
    text = "".join(choices[0]["delta"].get("content") or "" for choices in pieces if choices)
    assert "Paris" in text
    assert len(events) > 3


def _compared(rack: Rack, candidate: str, text: str) -> list[tuple[float, float, bool, float]]:
    """Per token of `text`: log-probability on one rank and by the candidate, whether both prefer the same token, the
    margin between the two best of one rank."""
    rows = []
    entries_of = [_prompt_logprobs(rack, name, text) for name in ("one", candidate)]
    for one, other in zip(*entries_of, strict=True):
        actual = next(iter(one))  # the prompt's own token stands first
        best = sorted((entry["logprob"] for entry in one.values()), reverse=True)
        top = [min(entries, key=lambda token: entries[token]["rank"]) for entries in (one, other)]
        rows.append((one[actual]["logprob"], other[actual]["logprob"], top[0] == top[1], best[0] - best[1]))
    return rows


def _prompt_logprobs(rack: Rack, name: str, text: str) -> list[dict[str, Any]]:
    body = {"model": name, "prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    entries: list[dict[str, Any]] = rack.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [entry for entry in entries if entry is not None]


def test_tensor_parallel_stages_and_copies_all_answer(vllm_python: Path, tiny_model: Path, serve: Any) -> None:
    rack = serve(
        model("tensor", tiny_model, vllm_python, tensor_parallel=2),
        # Not eager: on the processor vLLM 0.32.0 makes the buffers between stages in the pass that compiles.
        model("stages", tiny_model, vllm_python, pipeline_parallel=2, engine_args={}),
    )
    rack.wait_until(all_ready, "ready")
    answers = {}
    for name in ("tensor", "stages"):
        body = {"model": name, "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = rack.post("/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 8
        answers[name] = answer["choices"][0]["text"]
        events = list(rack.stream("/v1/completions", body))
        assert events[-1] == "[DONE]"
        tokens = rack.post("/tokenize", {"model": name, "prompt": "hello"})
        assert tokens["tokens"][0] == 1  # BOS
        assert tokens["count"] == len(tokens["tokens"])
        back = rack.post("/detokenize", {"model": name, "tokens": tokens["tokens"][1:]})
        assert back["content"].strip() == "hello"
    assert answers["tensor"] == answers["stages"]


def test_a_killed_rank_takes_its_replica_down_and_it_comes_back_once(
    vllm_python: Path, tiny_model: Path, serve: Any
) -> None:
    rack = serve(model("m", tiny_model, vllm_python, tensor_parallel=2, replicas=2))
    before = rack.wait_until(all_ready, "ready")
    family = before["m-0"]["pids"]
    os.kill(family[-1], 9)  # the youngest: a rank
    rack.wait_until(lambda now: now["m-0"]["state"] != "ready", "torn down", 60)
    body = {"model": "m", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    assert rack.post("/v1/completions", body)["usage"]["completion_tokens"] == 4  # by the other replica
    after = rack.wait_until(all_ready, "ready again")
    assert after["m-0"]["restarts"] == 1
    assert after["m-1"]["restarts"] == 0
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


def test_heads_that_do_not_divide_are_refused_before_a_start(vllm_python: Path, smollm2: Path, serve: Any) -> None:
    rack = serve(model("two", smollm2, vllm_python, tensor_parallel=2))
    assert rack.process.wait(timeout=60) == 2
    text = rack.output.read_text()
    assert "9 heads do not divide by 2" in text
    assert "tensor_parallel" in text


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
