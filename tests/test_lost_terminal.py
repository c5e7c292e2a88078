"""`serve` whose terminal or pipe goes away: it serves on, or finishes what runs and ends; nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamarack.errors import NothingRunning
from llamarack.paths import rack_paths
from llamarack.supervise.admin import ask
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.llamacpp
_DEADLINE_S = 60.0


def _serve(folder: Path, *, before: str = "") -> subprocess.Popen[bytes]:
    model = write_tiny_llama(folder / "m.gguf", speaks=True)
    limits = "{context_tokens: 512, sequences: 1, threads: 1}"
    (folder / "rack.yaml").write_text(
        f"models: [{{name: m, path: {model}, gpus: [], limits: {limits}}}]\ngateway: {{port: 0}}\n"
    )
    script = f'{before} exec "$0" -m llamarack serve rack.yaml'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, sys.executable],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "LLAMARACK_STATE_DIR": str(folder / "state")},
        start_new_session=True,
    )


async def _until_ready(folder: Path) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            try:
                record = await ask(rack_paths("rack", folder / "state"), {"op": "status"})
                if record["models"][0]["replicas"][0]["state"] == "ready" and not record["draining"]:
                    return
            except NothingRunning:
                pass
            await asyncio.sleep(0.2)


async def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> int:
    process.send_signal(number)
    return await asyncio.to_thread(process.wait, _DEADLINE_S)


async def test_reader_of_its_log_that_ends_is_not_the_end_of_the_rack(tmp_path: Path) -> None:
    process = _serve(tmp_path)
    assert process.stderr is not None
    try:
        first = await asyncio.to_thread(process.stderr.readline)
        assert b"loads m.gguf" in first
        process.stderr.close()  # as `| head -1` does
        await _until_ready(tmp_path)
        await asyncio.sleep(1)  # ready is an entry that nobody reads; the address that is told next is another
        await _until_ready(tmp_path)
        assert process.poll() is None
    finally:
        code = await _end(process, signal.SIGTERM)
    assert code == 143


async def test_closed_terminal_ends_it_in_order_and_nohup_keeps_it(tmp_path: Path) -> None:
    for before, ends in (("", True), ("trap '' HUP;", False)):
        folder = tmp_path / str(ends)
        folder.mkdir()
        process = _serve(folder, before=before)
        assert process.stderr is not None
        try:
            await _until_ready(folder)
            if ends:
                assert await _end(process, signal.SIGHUP) == 129
                assert not (folder / "state" / "racks" / "rack" / "state.json").exists()
            else:
                process.send_signal(signal.SIGHUP)
                await asyncio.sleep(1)
                await _until_ready(folder)
        finally:
            if process.poll() is None:
                assert await _end(process, signal.SIGTERM) == 143
            process.stderr.close()
