"""What tune calls llama.cpp's own settings is what a llama-server does that is told nothing but the model."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from llamarack.config import Group, Limits
from llamarack.measure.engine_defaults import own_limits
from llamarack.plan.llamacpp_group import batch_sizes
from tests.native import find_llama_server
from tests.tiny_model import write_tiny_llama

DEADLINE_S = 60.0


@pytest.mark.llamacpp
def test_own_settings_are_those_of_a_server_that_is_told_nothing(tmp_path: Path) -> None:
    program = find_llama_server()
    model = write_tiny_llama(tmp_path / "m.gguf", context=768)
    socket = tmp_path / "own.sock"
    log = tmp_path / "log"
    with log.open("wb") as out:
        # Port 0 would be a fixed one: a Unix socket is free for sure.
        command = [str(program), "--model", str(model), "--host", str(socket), "--log-verbosity", "4"]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        ends_s = time.monotonic() + DEADLINE_S
        while "n_slots =" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < ends_s, log.read_text(errors="replace")
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    said = log.read_text(errors="replace")
    own = own_limits(Group(limits=Limits(context_tokens=256, sequences=2)), [], 768)
    slots = re.search(r"n_slots = (\d+), n_ctx_slot = (\d+), kv_unified = '(\w+)'", said)
    assert slots is not None, said
    assert slots.groups() == (str(own.sequences), str(own.context_tokens), str(own.kv_unified).lower())
    batch, micro = re.search(r"n_batch += (\d+)", said), re.search(r"n_ubatch += (\d+)", said)
    assert batch is not None
    assert micro is not None
    # A batch is never longer than the context, so that of the server is cut here.
    wanted = [min(size, own.context_tokens) for size in batch_sizes(own)]
    assert [int(batch[1]), int(micro[1])] == wanted
