"""Racks with the real vLLM, started by the command a user types.

LLAMARACK_VLLM_PYTHON names an interpreter with vLLM (`llamarack engine install vllm` prints one); without it these
tests are skipped, or fail where LLAMARACK_REQUIRE_TIERS says `vllm` (make test-vllm).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamarack.errors import NothingRunning
from llamarack.model.demo import demo_model
from llamarack.paths import RackPaths, cache_dir, rack_paths
from llamarack.supervise.admin import ask
from tests.tiny_model_hf import write_tiny_hf_llama

START_TIMEOUT_S = float(os.environ.get("LLAMARACK_VLLM_START_S", "600"))
_CONVERT = Path(__file__).with_name("convert_smollm2.py")
# Quick to start, with room for the warm-up's long prompt in single letters. One thread per rank keeps OpenMP from
# waiting on cores that others use.
LIMITS = {"context_tokens": 1024, "sequences": 4, "batch_tokens": 512, "threads": 1}
EAGER = {"enforce-eager": True}  # compiling takes minutes on two cores


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    given = os.environ.get("LLAMARACK_VLLM_PYTHON")
    if given is None:
        pytest.skip("no vLLM: make test-vllm installs it and runs these")
    return Path(given)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf_llama(tmp_path_factory.mktemp("tiny") / "tiny-hf")


@pytest.fixture(scope="session")
def smollm2(vllm_python: Path) -> Path:
    """SmolLM2-135M-Instruct as Hugging Face weights, made once from the demo's GGUF and kept in the cache."""
    folder = cache_dir() / "smollm2-hf"
    if not (folder / "model.safetensors").exists():
        source = demo_model(cache_dir(), print)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [str(vllm_python), str(_CONVERT), str(source), str(folder)]
        subprocess.run(command, check=True, timeout=600, env=environment)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Rack:
    process: subprocess.Popen[bytes]
    paths: RackPaths
    output: Path

    def status(self) -> dict[str, Any]:
        try:
            return asyncio.run(ask(self.paths, {"op": "status"}))
        except NothingRunning:
            return {"models": []}

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {replica["id"]: replica for model in self.status()["models"] for replica in model["replicas"]}

    def wait_until(self, is_so: Any, what: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            replicas = self.replicas()
            if replicas and is_so(replicas):
                return replicas
            if self.process.poll() is not None:
                break
            time.sleep(1)
        raise AssertionError(f"not {what} after {timeout_s:.0f} s:\n{self.output.read_text()}\n{self.replicas()}")

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
        with urllib.request.urlopen(self._request(path, body), timeout=timeout_s) as response:
            value: dict[str, Any] = json.load(response)
            return value

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Iterator[str]:
        """The data of each event, as it comes."""
        with urllib.request.urlopen(self._request(path, {**body, "stream": True}), timeout=timeout_s) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        port = self.status()["gateway"]["port"]
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """`serve(*models)` -> Rack, not yet ready; ended with the test."""
    state = tmp_path / "st"
    racks: list[Rack] = []

    def start(*models: dict[str, Any], **supervise: Any) -> Rack:
        file = tmp_path / f"rack{len(racks)}.yaml"
        supervise = {"start_deadline": START_TIMEOUT_S} | supervise
        value = {"schema_version": 1, "models": list(models), "gateway": {"port": 0}, "supervise": supervise}
        file.write_text(yaml.safe_dump(value))
        output = tmp_path / f"{file.stem}.out"
        with open(output, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "llamarack", "serve", str(file), "--state-dir", str(state)],
                stdout=log,
                stderr=log,
            )
        racks.append(Rack(process=process, paths=rack_paths(file.stem, state), output=output))
        return racks[-1]

    yield start
    for rack in racks:
        if rack.process.poll() is None:
            rack.process.send_signal(signal.SIGINT)
            try:
                rack.process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                rack.process.kill()


def model(name: str, path: Path, python: Path, **group: Any) -> dict[str, Any]:
    settings = {"limits": LIMITS, "engine_args": EAGER} | group
    return {"name": name, "path": str(path), "engine_python": str(python), "engine": "vllm", **settings}


def all_ready(replicas: dict[str, dict[str, Any]]) -> bool:
    return all(replica["state"] == "ready" for replica in replicas.values())
