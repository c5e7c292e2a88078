"""Every command of docs/operations-change.md, on real racks with the real library: several models in one file, changed
while they serve."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamarack.config import load
from llamarack.errors import ModelError
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir, rack_paths
from llamarack.supervise.journal import read_entries
from tests.supervise.asking import stream_once
from tests.supervise.conftest import left_of
from tests.supervise.test_change import _most_loading, traffic
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.llamacpp
DEADLINE_S = 300.0
MANUAL = Path(__file__).parents[1] / "docs" / "operations-change.md"
MODELS = ("one", "two", "chat")


class Shell:
    """Commands of this checkout on one state folder, as the manual types them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "rack.yaml"
        self.typed: list[str] = []

    def __call__(self, line: str) -> subprocess.CompletedProcess[str]:
        self.typed.append(line)
        words = line.split()
        assert words[0] == "llamarack"
        environment = {**os.environ, "LLAMARACK_LOAD_LOCK": str(self.folder / "load.lock"), "NO_COLOR": "1"}
        environment["LLAMARACK_STATE_DIR"] = str(self.folder / "state")
        return subprocess.run(
            [sys.executable, "-m", "llamarack", *words[1:]],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=environment,
            cwd=self.folder,
            check=False,
        )

    def ok(self, line: str) -> str:
        done = self(line)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self("llamarack status --json --rack rack").stdout)
        return record

    def edit(self, **changes: Any) -> None:
        """`chat={...}` changes that model, `gateway={...}` that section."""
        value = yaml.safe_load(self.file.read_text())
        for name, change in changes.items():
            part = next((m for m in value["models"] if m["name"] == name), None) or value.setdefault(name, {})
            part.update(change)
        self.file.write_text(yaml.safe_dump(value))

    def states(self) -> dict[str, str]:
        return {row["id"]: row["state"] for model in self.status()["models"] for row in model["replicas"]}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A rack of three real models in one file."""
    try:
        chat = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    folder = tmp_path_factory.mktemp("operations")
    shell = Shell(folder)
    limits = {"context_tokens": 256, "sequences": 2, "threads": 1}
    models = [
        {
            "name": name,
            "path": str(write_tiny_llama(folder / f"{name}.gguf", seed=seed, speaks=True)),
            "limits": limits,
        }
        for seed, name in ((1, "one"), (2, "two"))
    ]
    models.append({"name": "chat", "path": str(chat), "limits": {**limits, "context_tokens": 512, "sequences": 8}})
    shell.file.write_text(yaml.safe_dump({"models": models, "gateway": {"port": 0, "max_queue_s": 300}}))
    try:
        print(shell.ok("llamarack serve rack.yaml --detach"))
        yield shell
    finally:
        print(shell("llamarack stop --rack rack").stderr)
    assert not left_of(folder)


def _url(shell: Shell) -> str:
    return f"http://127.0.0.1:{shell.status()['gateway']['port']}"


async def _says(url: str, model: str) -> int:
    outcome = await stream_once(url, model=model, tokens=4, timeout_s=DEADLINE_S)
    assert outcome.fault is None
    return outcome.events


async def test_each_model_of_the_file_answers_under_its_name_and_loads_came_one_by_one(shell: Shell) -> None:
    url = _url(shell)
    for name in MODELS:
        assert await _says(url, name) > 0
    assert shell.states() == {"one-0": "ready", "two-0": "ready", "chat-0": "ready"}
    assert "chat-0" in shell.ok("llamarack status --rack rack")
    entries = read_entries(rack_paths("rack", shell.folder / "state").events, 1000)
    assert _most_loading(entries) == 1
    assert [entry.kind for entry in entries].count("starting") == 3


def test_second_serve_of_the_file_is_refused(shell: Shell) -> None:
    done = shell("llamarack serve rack.yaml")
    assert done.returncode == 2
    assert re.search(r"rack `rack` is already running \(process \d+\)", done.stderr)


def test_reload_without_an_edit_has_nothing_to_do(shell: Shell) -> None:
    assert "nothing to do: rack rack is what rack.yaml asks for" in shell.ok("llamarack reload --rack rack")


async def test_edited_model_is_replaced_under_eight_streams_and_none_is_lost(shell: Shell) -> None:
    url = _url(shell)
    shell.edit(chat={"limits": {"context_tokens": 1024, "sequences": 8, "threads": 1}})
    before = {model["name"]: model["replicas"][0]["pid"] for model in shell.status()["models"]}
    told = shell.ok("llamarack reload --rack rack --dry-run")
    assert "would change to generation 2:\n  1. start chat-0-g2\n  2. end chat-0 once its requests are finished" in told
    async with traffic(url, 8, model="chat", tokens=24, timeout_s=DEADLINE_S) as outcomes:
        told = await asyncio.to_thread(shell.ok, "llamarack reload --rack rack")
    assert [outcome.fault for outcome in outcomes if outcome.fault] == []
    assert len(outcomes) >= 8
    assert "done  generation 2 serves" in told
    record = shell.status()
    after = {model["name"]: model["replicas"][0]["pid"] for model in record["models"]}
    assert (after["one"], after["two"]) == (before["one"], before["two"])
    assert after["chat"] != before["chat"]
    assert record["generation"] == 2
    assert record["models"][2]["replicas"][0]["context_tokens"] == 1024


def test_where_the_rack_listens_cannot_be_edited(shell: Shell) -> None:
    shell.edit(gateway={"port": 1})
    done = shell("llamarack reload --rack rack")
    assert done.returncode == 2
    assert "`gateway.port` is `0`, `1` in the file" in done.stderr
    shell.edit(gateway={"port": 0})


async def test_new_model_that_fails_leaves_the_old_one(shell: Shell) -> None:
    text = shell.file.read_text()
    shell.edit(two={"engine_args": {"no-such-option": 1}})
    done = shell("llamarack reload --rack rack")
    assert done.returncode in {2, 5}, done.stderr
    assert shell.states()["two-0"] == "ready"
    assert await _says(_url(shell), "two") > 0
    shell.file.write_text(text)


async def test_drained_replica_comes_back_by_reload(shell: Shell) -> None:
    shell.ok("llamarack drain one-0 --rack rack")
    for _ in range(300):
        if shell.states()["one-0"] == "stopped":
            break
        await asyncio.sleep(0.2)
    shell.ok("llamarack reload --rack rack")
    assert shell.states()["one-0-g3"] == "ready"
    assert await _says(_url(shell), "one") > 0


async def test_trial_of_a_changed_engine_rolls_on(shell: Shell) -> None:
    shell.edit(two={"env": {"LLAMA_ARG_ANY": "1"}})  # any difference makes it another engine
    async with traffic(_url(shell), 4, model="two", tokens=4, timeout_s=DEADLINE_S) as outcomes:
        told = await asyncio.to_thread(shell.ok, "llamarack reload --rack rack --canary 0.3 --for 20s")
    assert [outcome.fault for outcome in outcomes if outcome.fault] == []
    assert "two-0-g4: on trial with 30 % of the requests for 20.00 s" in told
    assert "the trial went well: two-0-g4: 0 of its" in told


def test_restart_replaces_what_is_unchanged_and_the_journal_has_every_step(shell: Shell) -> None:
    told = shell.ok("llamarack reload --rack rack --restart")
    assert set(shell.states()) == {"one-0-g5", "two-0-g5", "chat-0-g5"}
    shown = shell.ok("llamarack status --events 50 --rack rack")
    for text in (told, shown):
        assert "step 6 of 6: end chat-0-g2 once its requests are finished" in text
    assert "nothing" in shell.ok("llamarack reload --rack rack")
    assert "is not changing" in shell.ok("llamarack reload --rack rack --abort")


def test_every_command_of_the_manual_is_run_here(shell: Shell) -> None:
    """Compared by command and options; names and values are the reader's."""

    def shape(line: str) -> tuple[str, ...]:
        words = line.split("#")[0].split()
        return (words[1], *(word for word in words if word.startswith("--") and word != "--rack"))

    blocks = re.findall(r"```\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    written = {shape(line) for block in blocks for line in block.splitlines() if line.startswith("llamarack ")}
    typed = {shape(line) for line in shell.typed} | {("drain",)}  # of the whole rack: the same path as `stop`
    assert written <= typed
    files = [block for block in blocks if block.startswith("models:")]
    for text in files:  # the files in it are files of this version
        path = shell.folder / "manual.yaml"
        value = yaml.safe_load(text)
        for model in value["models"]:
            model["path"] = str(shell.folder / "one.gguf")
            model["engine_binary"] = sys.executable
        path.write_text(yaml.safe_dump(value))
        assert load(path).deployment.models[0].groups[0].engine_binary is not None


def test_wrong_options_say_what_to_type(shell: Shell) -> None:
    for line, named in (
        ("llamarack reload --canary 0.9", "--canary: a fraction from 0.01 to 0.5, 0.9 given"),
        ("llamarack reload --canary 0.1 --for ever", "--for: `ever` is not a duration"),
        ("llamarack reload missing.yaml", "deployment file `"),
    ):
        done = shell(line)
        assert done.returncode == 2
        assert named in done.stderr
