"""The documents' `tune` lines, each as it stands on the real llama.cpp with a tiny model, and with less load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamarack.measure.prompts import common_words
from tests.docs.fates import NO_COMMANDS, TUNE, fates
from tests.docs.reading import DOCUMENTS, ROOT, Command, typed
from tests.tiny_model import write_tiny_llama
from tests.tiny_model_hf import FEED_FORWARD, HEADS, HIDDEN, KV_HEADS, LAYERS, write_tiny_hf_llama

pytestmark = pytest.mark.llamacpp
_TIMEOUT_S = 600.0
_SHAPE: dict[str, Any] = {
    "layers": LAYERS,
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "hidden": HIDDEN,
    "feed_forward": FEED_FORWARD,
}
_LIMITS = {"context_tokens": 1024, "sequences": 4, "threads": 1}
_FEW = ["--requests", "20", "--input-tokens", "32", "--output-tokens", "4"]
_TWO_SETTINGS = ["--budget", "1s"]  # the fewest: the engine's own and the file, and the rounds that compare them
# A promise that nobody keeps is not confirmed, which leaves the search alone.
_SEARCH_ALONE = ["--slo", "ttft:0.001", "--concurrency", "4"]
_ONE_STEP = ["--batch-tokens", "256", "--sequences", "8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """`less`: options that follow a line; the last of an option counts. `seen`: values of a trial's key, of which
    each must have been tried.
    """

    less: tuple[str, ...]
    seen: dict[str, set[int]]


# By an option that the line has.
_LINES = {
    "--slo": Expected(less=(*_TWO_SETTINGS, "--concurrency", "4"), seen={"is_own": {True, False}}),
    "--input-tokens": Expected(less=(*_TWO_SETTINGS, "--slo", "ttft:0.001"), seen={"is_own": {True, False}}),
    "--budget": Expected(less=tuple(_SEARCH_ALONE), seen={"batch_tokens": {512, 2048, 8192}, "sequences": {128, 256}}),
    "--context": Expected(less=(*_SEARCH_ALONE, *_ONE_STEP), seen={"context_tokens": {2048, 4096}}),
    "--also": Expected(less=(*_SEARCH_ALONE, *_ONE_STEP), seen={"weights": {0, 1, 2}}),
}


def _commands() -> list[Command]:
    found: dict[str, Command] = {}
    for document in DOCUMENTS:
        if str(document.relative_to(ROOT)) in NO_COMMANDS:
            continue
        for command in typed(document):
            if fates(command) == ["tests/docs/test_tune_commands.py"]:
                found.setdefault(command.text, command)
    return list(found.values())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A reader's folder: a deployment, and the same model in another precision and in another engine's format."""
    words = common_words()
    write_tiny_llama(tmp_path / "model.gguf", speaks=True, context=4096, words=words, **_SHAPE)
    write_tiny_llama(tmp_path / "model.Q4_K_M.gguf", speaks=True, context=4096, words=words, seed=1, **_SHAPE)
    write_tiny_hf_llama(tmp_path / "model-hf")
    model = {"name": "m", "path": "model.gguf", "gpus": [], "limits": _LIMITS}
    (tmp_path / "rack.yaml").write_text(yaml.safe_dump({"models": [model], "gateway": {"port": 0}}))
    return tmp_path


def test_every_kind_of_line_is_known():
    assert {_option(command) for command in _commands()} == set(_LINES)


@pytest.mark.parametrize("command", _commands(), ids=str)
def test_tune_line_measures_what_it_names(command: Command, place: Path) -> None:
    expected = _LINES[_option(command)]
    before = (place / "rack.yaml").read_text()
    less = " ".join([*_FEW, *expected.less])
    text = f'"$PYTHON" -m {command.text} {less} --folder run'
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "LLAMARACK_STATE_DIR": str(place / "state"),
        "LLAMARACK_LOAD_LOCK": str(place / "load.lock"),
    }
    done = subprocess.run(
        ["sh", "-c", text],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=environment,
        cwd=place,
        check=False,
    )
    assert done.returncode in TUNE["tune"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    record = json.loads((place / "run" / "tune.json").read_text())
    for key, values in expected.seen.items():
        assert values <= {each["trial"][key] for each in record["outcomes"]}, done.stderr
    for outcome in record["outcomes"]:
        _require_measured(outcome, record)
    assert (place / "rack.yaml").read_text() == before
    assert (place / "rack.tuned.yaml").exists() == record["is_better"]
    assert (place / "run" / "tune.html").exists()


def _require_measured(outcome: dict[str, Any], record: dict[str, Any]) -> None:
    """llama.cpp ran under the setting: there are levels, with a goodput or why not. vLLM is not in this tier;
    tests/vllm/test_tune.py has both.
    """
    if record["weights"][outcome["trial"]["weights"]]["engine"] == "vllm":
        assert outcome["reason"] == "engine `vllm` is not installed"
        return
    assert outcome["levels"], outcome
    assert (outcome["goodput_per_s"] is None) == (outcome["best_level"] is None)
    assert outcome["goodput_per_s"] is not None or outcome["reason"]


def _option(command: Command) -> str:
    return next(option for option in _LINES if option in command.words)
