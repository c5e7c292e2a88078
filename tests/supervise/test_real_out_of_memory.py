"""The real llama.cpp under a limit of address space: it cannot have the cache as planned, and gets a smaller plan."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from llamarack.errors import EngineError, ModelError
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir, rack_paths
from llamarack.supervise.admin import ask
from tests.supervise.asking import stream_once
from tests.supervise.conftest import left_of

pytestmark = pytest.mark.llamacpp
DEADLINE_S = 240.0
# Interpreter and library take some 0.8 GB of addresses; 131,072 tokens of cache are 3.0 GB, half of them 1.5 GB.
LIMIT_KIB = 3_000_000


@pytest.mark.fault(
    "out of memory of a real llama.cpp", "found by the lines that llama.cpp prints, started again with less"
)
async def test_cache_that_cannot_be_allocated_is_halved(tmp_path: Path) -> None:
    try:
        model = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    file = tmp_path / "rack.yaml"
    limits = "{context_tokens: 8192, sequences: 16, threads: 1}"
    file.write_text(f"models: [{{name: fake, path: {model}, gpus: [], limits: {limits}}}]\ngateway: {{port: 0}}\n")
    serve = [sys.executable, "-m", "llamarack", "serve", str(file), "--state-dir", str(tmp_path)]
    with open(tmp_path / "serve.log", "wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - takes 1 ms
            ["/bin/sh", "-c", f'ulimit -v {LIMIT_KIB} && exec "$@"', "serve", *serve], stdout=log, stderr=log
        )
    paths = rack_paths("rack", tmp_path)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                assert process.poll() is None, (tmp_path / "serve.log").read_text()
                try:
                    record = await ask(paths, {"op": "status"})
                except EngineError:
                    await asyncio.sleep(0.2)
                    continue
                row = record["models"][0]["replicas"][0]
                if row["state"] == "ready":
                    break
                await asyncio.sleep(0.2)
        assert [step["setting"] for step in row["degraded_from"]["steps"]] == ["batch_tokens", "context_tokens"]
        assert (row["context_tokens"], row["degraded_from"]["context_tokens"]) == (4096, 8192)
        kv = next(term for term in row["actual"]["terms"] if term["term"] == "kv_bytes")
        assert kv["error_fraction"] == pytest.approx(0, abs=0.01)  # the smaller plan is what runs
        outcome = await stream_once(f"http://127.0.0.1:{record['gateway']['port']}", tokens=8)
        assert outcome.fault is None
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
    assert not left_of(tmp_path)
