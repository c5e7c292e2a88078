"""One model over two nodes by vLLM's own launch: the rack runs node 0, `llamarack node` the second, as documented."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import EAGER, all_ready, model

pytestmark = pytest.mark.vllm


def test_two_nodes_answer_as_one_replica(vllm_python: Path, tiny_model: Path, serve: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"nnodes": 2, "node-rank": 0, "master-addr": "127.0.0.1", "master-port": port}
    rack = serve(model("m", tiny_model, vllm_python, tensor_parallel=2, engine_args=EAGER | meeting))
    log = tmp_path / "node-1.log"
    with open(log, "wb") as output:
        second = subprocess.Popen(
            [sys.executable, "-m", "llamarack", "node", str(tmp_path / "rack0.yaml"), "--node-rank", "1"],
            stdout=output,
            stderr=output,
            env={**os.environ, "LLAMARACK_STATE_DIR": str(tmp_path / "node-1")},
            start_new_session=True,
        )
    try:

        def both_stand(replicas: dict[str, dict[str, Any]]) -> bool:
            assert second.poll() is None, log.read_text()
            return all_ready(replicas)

        (replica,) = rack.wait_until(both_stand, "ready").values()
        body = {"model": "m", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert rack.post("/v1/completions", body)["usage"]["completion_tokens"] == 8
        assert second.poll() is None, log.read_text()
        assert second.pid not in replica["pids"]
    finally:
        if second.poll() is None:
            os.killpg(second.pid, signal.SIGTERM)
            try:
                second.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(second.pid, signal.SIGKILL)
