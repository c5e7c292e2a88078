"""Commands of the documents that are other programs': typed in a folder that stands for the reader's machine.

What only a network could do is refused in the way that shows that the line was understood; a program that is not here
skips its line.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llamarack.errors import ModelError
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from tests.docs.fates import HERE
from tests.docs.reading import DOCUMENTS, ROOT, typed
from tests.native import find_llama_server
from tests.supervise.conftest import left_of

pytestmark = pytest.mark.process
_TIMEOUT_S = 180.0
_PLACES = ("/data/models", "/mnt/share", "/etc/prometheus")
_OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": "/dev/null"}
_OFFLINE |= {"HF_ENDPOINT": "http://127.0.0.1:9", "MODELSCOPE_DOMAIN": "127.0.0.1:9"}  # where nobody listens


def line(start: str) -> str:
    """The only line of the documents that begins so."""
    texts = {one.text for document in DOCUMENTS for one in typed(document) if one.text.startswith(start)}
    (text,) = texts
    assert text in HERE, f"{text} is not in HERE of tests/docs/fates.py"
    return text


def run(
    text: str, folder: Path, *, within: Path | None = None, path: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    """`path`: folders before those of PATH. `within`: where it is typed; default: `folder`, which holds the places."""
    for place in _PLACES:
        (folder / place[1:]).mkdir(parents=True, exist_ok=True)
        text = text.replace(place, str(folder / place[1:]))
    environment = {**os.environ, **_OFFLINE, **more, "PATH": os.pathsep.join(filter(None, (path, os.environ["PATH"])))}
    return subprocess.run(
        ["sh", "-c", text],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=environment,
        cwd=within or folder,
        check=False,
    )


def beside_vllm(program: str) -> str:
    """The folder of vLLM's interpreter, which brings some of them. Skips where the program is nowhere."""
    python = os.environ.get("LLAMARACK_VLLM_PYTHON")
    folder = str(Path(python).parent) if python else ""
    if shutil.which(program, path=os.pathsep.join([folder, os.environ["PATH"]])) is None:
        pytest.skip(f"{program} is not here")
    return folder


def test_activating_the_environment_puts_its_programs_first(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True, timeout=60)
    done = run(f"{line('. .venv')} && command -v python", tmp_path)
    assert done.stdout.strip() == str(tmp_path / ".venv" / "bin" / "python"), done.stderr


@pytest.mark.parametrize("package", ["huggingface_hub", "modelscope"])
def test_packages_are_asked_for_by_name(tmp_path: Path, package: str) -> None:
    """Without an index, in an environment that has neither."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "v"], cwd=tmp_path, check=True, timeout=60)
    pip = tmp_path / "v" / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip --python "{tmp_path}/v/bin/python" "$@"\n')
    pip.chmod(0o755)
    done = run(line(f"pip install {package}"), tmp_path, path=str(pip.parent))
    assert done.returncode == 1
    assert f"No matching distribution found for {package}" in done.stderr


@pytest.mark.parametrize("program", ["hf", "modelscope"])
def test_weights_are_asked_for_in_words_that_the_program_knows(tmp_path: Path, program: str) -> None:
    path = beside_vllm(program)
    done = run(line(f"{program} download"), tmp_path, path=path, HF_HOME=str(tmp_path / "hf"))
    assert done.returncode != 0
    assert "Connection refused" in done.stdout + done.stderr, done.stdout + done.stderr


def test_weights_are_copied_and_a_copy_cut_short_is_finished(tmp_path: Path) -> None:
    beside_vllm("rsync")
    text = line("rsync")
    share, disk = tmp_path / "mnt" / "share", tmp_path / "data" / "models"
    share.mkdir(parents=True)
    disk.mkdir(parents=True)
    name = "llama-2-13b-chat.Q8_0.gguf"
    (share / name).write_bytes(os.urandom(1 << 20))
    (disk / name).write_bytes((share / name).read_bytes()[: 1 << 19])
    done = run(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stdout
    assert (disk / name).read_bytes() == (share / name).read_bytes()


def test_monitoring_files_are_copied_from_where_the_document_says(tmp_path: Path) -> None:
    done = run(line("cp examples/prometheus"), tmp_path, within=ROOT)
    assert done.returncode == 0, done.stderr
    copied = {file.name for file in (tmp_path / "etc" / "prometheus").iterdir()}
    assert copied == {"prometheus.yml", "llamarack.rules.yml"}
    rules = (tmp_path / "etc" / "prometheus" / "prometheus.yml").read_text()
    assert "llamarack.rules.yml" in rules  # by a path that is right beside it


@pytest.mark.native
def test_rpc_server_listens_where_the_document_says(tmp_path: Path) -> None:
    """In a network namespace of its own, which gets the document's address."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root, unshare and ip")
    folder = find_llama_server().parent
    text = line("ggml-rpc-server")
    listens = f"{sys.executable} -c 'import socket; socket.create_connection((\"10.0.0.5\", 50052), 1).close()'"
    wait = f"for _ in $(seq 120); do {listens} 2>/dev/null && exit 0; sleep 0.5; done; exit 1"
    inside = f"ip link set lo up && ip addr add 10.0.0.5/32 dev lo && {{ {text} & trap 'kill $!' EXIT; {wait}; }}"
    done = run(f"unshare --net sh -c '{inside.replace(chr(39), chr(39) + chr(92) + chr(39) * 2)}'", tmp_path,
               path=str(folder))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.llamacpp
def test_make_demo_answers_and_serves_until_ctrl_c(tmp_path: Path) -> None:
    """With an environment that is installed already, and at a port that is free."""
    try:
        demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "llamarack").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llamarack "$@" --port 0\n')
    (programs / "llamarack").chmod(0o755)
    (tmp_path / "venv" / ".installed").touch()
    state = {"LLAMARACK_STATE_DIR": str(tmp_path / "state"), "LLAMARACK_LOAD_LOCK": str(tmp_path / "load.lock")}
    with subprocess.Popen(
        ["sh", "-c", f"exec {line('make demo')} VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **state},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        late = threading.Timer(_TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        said = ""
        try:
            for text in process.stdout:
                said += text
                if "Ctrl-C stops it" in text:
                    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            process.wait(_TIMEOUT_S)
        finally:
            late.cancel()
    assert "Paris" in said
    assert "curl" in said
    assert not left_of(tmp_path)
