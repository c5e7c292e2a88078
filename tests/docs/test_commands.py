"""Every command that a document shows exists with those options; what is quick and harmless is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from llamarack.cli import parser
from llamarack.plan.reference import LLAMA2
from tests.docs.fates import QUICK
from tests.docs.reading import DOCUMENTS, ROOT, Command, anchors, blocks, commands, links
from tests.plan.files import sparse_gguf, sparse_safetensors

OURS = [command for document in DOCUMENTS for command in commands(document, "llamarack")]
MADE = [command for document in DOCUMENTS for command in commands(document, "make")]
_RACK = """\
schema_version: 1
models:
  - name: llama2-13b-chat
    path: {models}/llama-2-13b-chat.Q8_0.gguf
    gpus: []
    limits: {{context_tokens: 4096, sequences: 2}}
gateway: {{host: 0.0.0.0, port: 8080, api_keys_file: keys.yaml}}
"""
_SPREAD = """\
schema_version: 1
models:
  - name: m
    path: {models}/Llama-2-13b-chat-hf
    engine: vllm
    tensor_parallel: 4
    gpus: [0, 1]
    engine_args: {{nnodes: 2, master-addr: 10.0.0.1}}
gateway: {{host: 0.0.0.0, port: 8080, api_keys_file: keys.yaml}}
"""


@pytest.fixture(scope="module")
def root_command() -> typer.core.TyperGroup:
    parser.register(None)
    command = typer.main.get_command(parser.app)
    assert isinstance(command, typer.core.TyperGroup)
    return command


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader's would be: models (headers only), a deployment file."""
    folder = tmp_path_factory.mktemp("reader")
    models = folder / "models"
    models.mkdir()
    for size, label in (("13B", "Q8_0"), ("13B", "Q4_K_M"), ("70B", "Q4_K_M")):
        sparse_gguf(models / f"llama-2-{size.lower()}-chat.{label}.gguf", LLAMA2[size], label)
    sparse_safetensors(models / "Llama-2-13b-chat-hf", LLAMA2["13B"])
    (folder / "model.gguf").symlink_to(models / "llama-2-13b-chat.Q8_0.gguf")
    add = [sys.executable, "-m", "llamarack", "keys", "add", "reader", "--file", "keys.yaml"]
    subprocess.run(add, cwd=folder, capture_output=True, timeout=60, check=True)
    return folder


def test_documents_show_commands():
    assert len(OURS) > 30
    assert len(MADE) > 3


@pytest.mark.parametrize("command", OURS, ids=str)
def test_command_and_its_options_exist(root_command, command: Command):
    group, words = root_command, list(command.words[1:])
    if words[0] in {"--version", "COMMAND"}:
        return
    for name in re.split(r"[|,]", words[0]):
        assert name in group.commands, f"no command `{name}`"
    found = group.commands[words[0].split("|")[0]]
    words.pop(0)
    if isinstance(found, typer.core.TyperGroup):
        if not words:
            return
        for name in words[0].split("|"):
            assert name in found.commands, f"no command `{name}`"
        found = found.commands[words.pop(0).split("|")[0]]
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        option = word.strip("[]").split("=")[0]
        if option.startswith("-") and not re.fullmatch(r"-?[\d.]+", option):
            assert option in known | {"--help"}, f"`{found.name}` has no option {option}"


@pytest.mark.parametrize(
    "command", [one for one in OURS if one.is_whole and one.words[1] in QUICK and one.words[-1] != "-"], ids=str
)
def test_quick_command_runs_as_it_stands(command: Command, place: Path, monkeypatch):
    monkeypatch.setenv("LLAMARACK_STATE_DIR", str(place / "state"))
    words = [word.replace("/data/models", str(place / "models")) for word in command.words[1:]]
    if any(word.isupper() or "..." in word for word in words):
        pytest.skip("a form with placeholders, not a line to type: its options are checked above")
    if "hardware.json" in words and not (place / "hardware.json").exists():
        shown = subprocess.run(
            [sys.executable, "-m", "llamarack", "check", "--json"], cwd=place, capture_output=True, timeout=120
        )
        (place / "hardware.json").write_bytes(shown.stdout)
    for word in words:
        if word.endswith(".yaml") and word != "keys.yaml":  # anew, since a command before may have written it
            text = _SPREAD if word == "spread.yaml" else _RACK
            (place / word).write_text(text.format(models=place / "models"))
    done = subprocess.run(
        [sys.executable, "-m", "llamarack", *words], cwd=place, capture_output=True, text=True, timeout=180
    )
    assert done.returncode in QUICK[command.words[1]], done.stderr
    assert "Traceback" not in done.stderr


def test_quick_start_asks_for_the_model_by_the_name_that_its_plan_wrote(place: Path, tmp_path: Path):
    text = (ROOT / "docs" / "quick-start.md").read_text()
    (planned,) = [
        one for one in OURS if one.document == "docs/quick-start.md" and one.is_whole and one.words[1] == "plan"
    ]
    words = [word.replace("/data/models", str(place / "models")) for word in planned.words[1:]]
    words[words.index("-o") + 1] = str(tmp_path / "rack.yaml")
    words += ["--gpus", "A100-80"]  # whatever this machine has
    subprocess.run([sys.executable, "-m", "llamarack", *words], capture_output=True, timeout=180, check=True)
    name = yaml.safe_load((tmp_path / "rack.yaml").read_text())["models"][0]["name"]
    assert f'"model": "{name}"' in text


@pytest.mark.parametrize("command", MADE, ids=str)
def test_make_target_exists(command: Command):
    rules = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    targets = [word for word in command.words[1:] if re.fullmatch(r"[a-z][\w-]*", word)]
    assert targets
    assert set(targets) <= rules


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document: Path):
    for target in links(document):
        path, _, anchor = target.partition("#")
        assert (document.parent / path).exists(), target
        if anchor:
            assert anchor in anchors(document.parent / path), target


def test_the_sizing_guide_shows_what_the_command_prints():
    printed = subprocess.run(
        [sys.executable, "-m", "llamarack", "plan", "--table", "llama2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"COLUMNS": "160", "PATH": "/usr/bin:/bin"},
    ).stdout
    shown = [text for _, text in blocks(ROOT / "docs" / "sizing.md") if text.startswith("model")]
    assert shown == [printed]


def test_the_chinese_readme_is_equal_in_content():
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    assert blocks(chinese) == blocks(english)

    def shape(document: Path) -> list[tuple[str, int]]:
        return [
            (line[: line.index(" ")] if line.startswith("#") else line[:1], line.count("|") - line.count("\\|"))
            for line in document.read_text(encoding="utf-8").splitlines()
            if line.startswith(("#", "|", "- ", "1.", "2.", "3.", "4.", "5.", "6."))
        ]

    assert shape(chinese) == shape(english)
    assert set(links(chinese)) - {"README.md"} == set(links(english)) - {"README.zh-CN.md"}
    assert [command.words for command in commands(chinese, "llamarack")] == [
        command.words for command in commands(english, "llamarack")
    ]
