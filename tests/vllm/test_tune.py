"""`tune --also` over two engines: a GGUF beside vLLM, and a folder for vLLM beside a GGUF, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny_model import write_tiny_llama
from tests.tiny_model_hf import FEED_FORWARD, HEADS, HIDDEN, KV_HEADS, LAYERS
from tests.vllm.conftest import EAGER, LIMITS, START_TIMEOUT_S

pytestmark = pytest.mark.vllm
# Questions, since a vocabulary of letters has no words of one token. A promise that nobody keeps ends the command
# without the rounds that compare the best with the others, ten more starts; so do steps that the file has already.
_LOAD = ["--prompts", "business-en", "--requests", "20", "--output-tokens", "4", "--concurrency", "2"]
_LOAD += ["--slo", "ttft:0.001"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny folder's shape."""
    shape: dict[str, Any] = {"layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS}
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_tiny_llama(path, hidden=HIDDEN, feed_forward=FEED_FORWARD, context=2048, speaks=True, **shape)


def _tuned(folder: Path, model: dict[str, Any], *words: str) -> dict[str, Any]:
    """The record of a run in which both engines answered; they are named by trial."""
    file = folder / "rack.yaml"
    supervise = {"start_deadline": START_TIMEOUT_S}
    limits = model["limits"]
    steps = ["--batch-tokens", str(limits["batch_tokens"]), "--sequences", str(limits["sequences"])]
    file.write_text(yaml.safe_dump({"models": [model], "gateway": {"port": 0}, "supervise": supervise}))
    done = subprocess.run(
        [sys.executable, "-m", "llamarack", "tune", str(file), *words, *_LOAD, *steps, "--folder", "run"],
        env=os.environ | {"LLAMARACK_STATE_DIR": str(folder / "st"), "LLAMARACK_LOAD_LOCK": str(folder / "lock")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=4 * START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 7, done.stdout + done.stderr
    record: dict[str, Any] = json.loads((folder / "run" / "tune.json").read_text())
    for outcome in record["outcomes"]:
        assert outcome["levels"], outcome["reason"]
        assert outcome["goodput_per_s"] == 0 or outcome["reason"]  # a busy machine makes no valid run
        (level,) = outcome["levels"]
        assert level["first_token_p50_s"] is not None
    return record


def test_gguf_beside_vllm(vllm_python: Path, tiny_model: Path, gguf: Path, tmp_path: Path) -> None:
    # What vLLM itself does on a processor: the file is then measured once, not beside it.
    own = {"context_tokens": 1024, "sequences": 128, "batch_tokens": 2048, "gpu_memory_fraction": 0.92, "threads": 1}
    model = {"name": "m", "path": str(tiny_model), "engine": "vllm", "engine_python": str(vllm_python), "gpus": []}
    record = _tuned(tmp_path, model | {"engine_args": EAGER, "limits": own}, "--also", str(gguf))
    assert [weights["engine"] for weights in record["weights"]] == ["vllm", "llamacpp"]
    assert {outcome["trial"]["weights"] for outcome in record["outcomes"]} == {0, 1}


def test_folder_for_vllm_beside_a_gguf(vllm_python: Path, tiny_model: Path, gguf: Path, tmp_path: Path) -> None:
    model = {"name": "m", "path": str(gguf), "gpus": [], "limits": LIMITS}
    record = _tuned(tmp_path, model, "--also", str(tiny_model), "--engine-python", str(vllm_python))
    assert [weights["engine"] for weights in record["weights"]] == ["llamacpp", "vllm"]
    assert {outcome["trial"]["weights"] for outcome in record["outcomes"]} == {0, 1}
