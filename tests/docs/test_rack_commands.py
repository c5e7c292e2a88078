"""Commands of the documents that need a rack, in their order, on one rack of a small model with the real llama.cpp.

Each is run as it stands, with less load: the options of `_SMALL` follow it, and the last of an option counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_connection

import pytest
import yaml

from llamarack.measure.prompts import common_words
from tests.docs.fates import NO_COMMANDS, ON_RACK, WHOLE_DOCUMENTS, fates, verb
from tests.docs.reading import DOCUMENTS, ROOT, Command, typed
from tests.supervise.conftest import left_of
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.llamacpp
_TIMEOUT_S = 300.0
_HERE = "tests/docs/test_rack_commands.py"
_FEW = ["--requests", "4", "--input-tokens", "64", "--output-tokens", "3"]
_SMALL = {
    "serve": ["--detach"],
    "bench": _FEW,
    "compare": ["--accept-invalid"],  # which those few requests are
    "verify": [
        "--prompts", "business-en", "--questions", "1", "--output-tokens", "3", "--load-streams", "0", "--no-restart",
    ],
    "acceptance": [
        "--prompts", "business-en", "--questions", "1", "--answer-tokens", "3", "--requests", "4", "--repeat", "1",
        "--input-tokens", "64", "--output-tokens", "3", "--concurrency", "1", "--no-functional",
    ],
}  # fmt: skip
_NAME = "llama-2-13b-chat.Q8_0"  # as `plan -o` names it, by the file
_CONTEXT_TOKENS = 4096  # a word of the prompts is several tokens of a vocabulary of bytes
_LIMITS = {"context_tokens": _CONTEXT_TOKENS, "sequences": 2, "threads": 1}


def _commands() -> list[Command]:
    """Each text once, in the order in which a reader meets it."""
    found: dict[str, Command] = {}
    for document in DOCUMENTS:
        name = str(document.relative_to(ROOT))
        if name not in NO_COMMANDS and name not in WHOLE_DOCUMENTS:
            for command in typed(document):
                if fates(command) == [_HERE]:
                    found.setdefault(command.text, command)
    return list(found.values())


@dataclass
class Reader:
    """A folder as a reader's would be, and a rack in it that the documents' own command started."""

    folder: Path
    url: str = ""
    served: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)

    def run(self, command: Command) -> subprocess.CompletedProcess[str]:
        text = command.text.replace("http://127.0.0.1:8080", self.url).replace(
            "/data/models", str(self.folder / "models")
        )
        text = text.replace("unix:///run/rack/gateway.sock", f"unix://{self.folder}/gateway.sock")
        if command.words[0] == "llamarack":
            small = _SMALL.get(verb(command), [])
            if "--duration" in command.words:  # which excludes --requests
                small = [*small[2:], "--duration", "1s", "--rate", "5,10"]
            text = f'"$PYTHON" -m {text} {" ".join(small)}'
            if "--follow" in command.words:
                text = f"timeout -s INT 10 {text}"
        return self.shell(text)

    def shell(self, text: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "NO_COLOR": "1",
            "LLAMARACK_STATE_DIR": str(self.folder / "state"),
            "LLAMARACK_CACHE_DIR": str(self.folder / "cache"),
            "LLAMARACK_LOAD_LOCK": str(self.folder / "load.lock"),
        }
        return subprocess.run(
            ["sh", "-c", text],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=environment,
            cwd=self.folder,
            check=False,
        )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "models").mkdir()
    model = folder / "models" / "llama-2-13b-chat.Q8_0.gguf"
    write_tiny_llama(model, context=_CONTEXT_TOKENS, speaks=True, words=common_words())
    (folder / "model.gguf").symlink_to(model)
    for name in ("rack", "one-card", "two-cards", "fp16", "q8", "before", "after"):
        served = {"name": _NAME, "path": str(model), "gpus": [], "limits": _LIMITS}
        value = {"models": [served], "gateway": {"port": 0, "max_queue_s": 300}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(value))
    reader = Reader(folder)
    try:
        for command in _commands():
            if verb(command) == "serve":
                reader.served[command.text] = reader.run(command)
        status = json.loads(reader.shell('"$PYTHON" -m llamarack status --rack rack --json').stdout)
        port = status["gateway"]["port"]
        reader.url = f"http://127.0.0.1:{port}"
        with _relayed(folder / "gateway.sock", port):
            yield reader
    finally:
        reader.shell('"$PYTHON" -m llamarack stop --rack rack')
    deadline = time.monotonic() + 60
    while left_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_of(folder)


@contextlib.contextmanager
def _relayed(socket: Path, port: int) -> Iterator[None]:
    """The rack's door as a Unix socket, such as a reader's proxy may have."""

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with create_connection(("127.0.0.1", port)) as inner:
                ends = {self.request: inner, inner: self.request}
                while True:
                    for ready in select.select(list(ends), [], [])[0]:
                        data = ready.recv(65536)
                        if not data:
                            return
                        ends[ready].sendall(data)

    with socketserver.ThreadingUnixStreamServer(str(socket), Relay) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            socket.unlink()


@pytest.mark.parametrize("command", _commands(), ids=str)
def test_command_runs_as_it_stands(command: Command, reader: Reader) -> None:
    program = command.words[0]
    if program != "llamarack" and shutil.which(program) is None:
        pytest.skip(f"{program} is not here (Debian: {program})")
    if verb(command) == "compare":
        _copies(reader.folder, command)
    done = reader.served.get(command.text) or reader.run(command)
    assert done.returncode in ON_RACK[verb(command)], done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if program == "curl":
        assert done.stdout.count("data: ") > 2, done.stdout
        assert done.stdout.rstrip().endswith("data: [DONE]")


def _copies(folder: Path, command: Command) -> None:
    """`compare a1,a2 b1,b2`: the runs of other days, which are those of today once more."""
    for kind, names in zip(("before", "after"), command.words[2:4], strict=True):
        for name in names.split(","):
            if not (folder / name).exists():
                shutil.copytree(folder / kind, folder / name)
