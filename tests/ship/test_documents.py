"""Every command of docs/offline.md and docs/deploy.md, run. What only a network or a registry could do is refused in
the way that shows that the command line was understood.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ship.wheels import write_bundle
from tests.tiny_model import write_tiny_llama
from tests.tiny_model_hf import write_tiny_hf_llama

pytestmark = pytest.mark.process
DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _commands(name: str) -> list[str]:
    text = (DOCS / name).read_text()
    return [line for block in _BLOCK.findall(text) for line in block.splitlines() if line.strip()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "m.gguf")
    keys = tmp_path / "keys.yaml"
    keys.write_text("schema_version: 1\nkeys: []\n")
    keys.chmod(0o600)
    (tmp_path / "rack.yaml").write_text(
        "models: [{name: m, path: m.gguf, gpus: []}]\ngateway: {api_keys_file: keys.yaml}\n"
    )
    write_tiny_hf_llama(tmp_path / "tiny-hf")
    (tmp_path / "spread.yaml").write_text(
        "models:\n- {name: big, path: tiny-hf, engine: vllm, tensor_parallel: 2, "
        "engine_args: {nnodes: 2, master-addr: 10.0.0.1}}\ngateway: {api_keys_file: keys.yaml}\n"
    )
    (tmp_path / "state" / "racks" / "rack" / "logs").mkdir(parents=True)
    return tmp_path


def _run(place: Path, line: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LLAMARACK_STATE_DIR": str(place / "state"),
        "PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_CONFIG_FILE": "/dev/null",
        "OURS": shlex.join([sys.executable, "-m", "llamarack"]),
    }
    if not line.startswith("llamarack "):
        environment.pop("PYTHONPATH", None)  # an installed one must not import this tree
    return subprocess.run(
        ["sh", "-c", re.sub(r"^llamarack ", "$OURS ", line)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        cwd=place,
        check=False,
    )


def test_commands_of_deploy(place: Path) -> None:
    lines = _commands("deploy.md")
    assert len(lines) >= 10
    for line in lines:
        done = _run(place, line)
        if line.startswith("llamarack bundle"):
            assert "No matching distribution" in done.stderr or "pip said" in done.stderr, done.stderr
            continue
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert (place / line.rpartition("> ")[2]).read_text().strip()


def test_commands_of_offline(place: Path) -> None:
    prefix = place / "opt"
    digest = write_bundle(place / "bundle", "1.0", models={"SmolLM2-135M-Instruct.Q4_1.gguf": b"x"})
    write_bundle(place / "bundle-2", "2.0", models={"SmolLM2-135M-Instruct.Q4_1.gguf": b"x"})
    lines = _commands("offline.md")
    assert len(lines) >= 13
    done_words = []
    for line in lines:
        line = line.replace("SHA256", digest).replace("/opt/llamarack", str(prefix))
        if line.startswith("llamarack bundle"):
            refused = _run(place, line.replace("-o bundle", "-o new").replace("--demo-model", ""))
            assert refused.returncode == 2
            named = "is not there" if "--model" in line else "pip said"
            assert named in refused.stderr, refused.stderr
            continue
        done = _run(place, line)
        if line.endswith("undo"):  # after `accept`, as the page has it, there is nothing to go back to
            assert done.returncode == 2, done.stderr
            continue
        assert done.returncode == 0, f"{line}: {done.stderr}"
        done_words.append(line)
    assert not prefix.exists()  # the last one was `uninstall`
    assert sum("support" in line for line in done_words) == 2


def test_variables_that_the_page_names_are_read_by_the_program() -> None:
    source = "\n".join(path.read_text() for path in (DOCS.parent / "src").rglob("*.py"))
    for name in set(re.findall(r"\b(?:LLAMARACK_[A-Z_]+|[A-Z]+_DIRECTORY)\b", (DOCS / "offline.md").read_text())):
        assert name in source, name


def test_result_that_the_page_names_is_there_and_proves_it() -> None:
    records = json.loads((DOCS.parent / "benchmarks" / "results" / "offline.json").read_text())
    assert "llamacpp" in records
    for record in records.values():
        assert record["packets_sent_out"] == []
        assert record["trap_catches"] is True
        assert record["install_folder_unchanged"] is True
