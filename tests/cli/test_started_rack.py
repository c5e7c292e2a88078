"""A rack started for one command: ready or a sentence, and never anything left, however its parent ends."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from llamarack.cli.started_rack import _own_settings, started_rack
from llamarack.config import Deployment, parse, plain, to_yaml, validated
from llamarack.errors import DoesNotFit, LlamarackError, ModelError, StartFailed
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from tests.supervise.conftest import left_of

DEADLINE_S = 240.0
# Says when it is ready and then waits to be killed.
_PARENT = """
import asyncio, sys
from pathlib import Path
from llamarack.cli.started_rack import started_rack
from llamarack.config import load

async def main():
    async with started_rack(load(Path(sys.argv[1])).deployment, folder=Path(sys.argv[2])) as rack:
        print(rack.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def own_load_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMARACK_LOAD_LOCK", str(tmp_path / "load.lock"))


@pytest.fixture
def model() -> Path:
    try:
        return demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


def _deployment(path: Path, extra: str = "") -> Deployment:
    limits = "{context_tokens: 512, sequences: 1, threads: 1}"
    return parse(f"models:\n  - {{name: m, path: {path}, gpus: [], limits: {limits}}}\n{extra}").deployment


def test_measured_rack_is_what_the_file_says_or_nothing_and_a_soaked_one_lives_by_its_rules(tmp_path: Path) -> None:
    file = _deployment(tmp_path / "m.gguf", "supervise: {restarts: {max: 3}, drain_s: 60, webhook: http://h/}\n")
    strict, _ = _own_settings(file, tmp_path, is_strict=True)
    assert (strict.supervise.restarts.max, strict.models[0].on_out_of_memory) == (0, "fail")
    by_its_rules, _ = _own_settings(file, tmp_path, is_strict=False)
    assert (by_its_rules.supervise.restarts.max, by_its_rules.models[0].on_out_of_memory) == (3, "degrade")
    for private in (strict, by_its_rules):
        assert (private.gateway.port, private.supervise.webhook) == (0, None)


@pytest.mark.llamacpp
async def test_rack_is_ready_answers_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    kinds: list[str] = []
    keys = tmp_path / "users-keys.yaml"
    keys.write_text("schema_version: 1\nkeys: []\n")
    keys.chmod(0o600)
    deployment = _deployment(model, f"gateway: {{host: 0.0.0.0, port: 80, api_keys_file: {keys}}}\n")
    folder = tmp_path / "rack"
    async with started_rack(deployment, folder=folder, on_entry=lambda entry: kinds.append(entry.kind)) as rack:
        record = await rack.status()
        assert [replica["state"] for replica in record["models"][0]["replicas"]] == ["ready"]
        assert "ready" in kinds
        assert record["gateway"]["host"] == "127.0.0.1"
        assert record["gateway"]["port"] != 80
        assert rack.api_key is not None
        assert rack.api_key not in repr(rack)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{rack.base_url}/v1/models") as response:
                assert response.status == 401  # the file asks for keys, so they are asked for here too
            headers = {"Authorization": f"Bearer {rack.api_key}"}
            async with session.get(f"{rack.base_url}/v1/models", headers=headers) as response:
                assert (await response.json())["data"][0]["id"] == "m"
    assert not psutil.pid_exists(rack.pid)
    assert not left_of(folder)
    assert not rack.paths.sockets.exists()
    assert rack.paths.events.exists()  # a folder that was named is kept


async def test_wrong_file_is_the_childs_own_sentence_and_exit_code(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf") as caught:
        async with started_rack(_deployment(tmp_path / "nothing.gguf"), folder=tmp_path / "rack"):
            pass
    assert caught.value.exit_code == 2
    assert not left_of(tmp_path / "rack")


async def test_temporary_folder_stays_only_where_its_log_explains(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ModelError):
        async with started_rack(_deployment(tmp_path / "nothing.gguf")):
            pass
    assert len(list(tmp_path.glob("llamarack-*"))) == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), started_rack(_deployment(model)):
            pass
    assert len(list(tmp_path.glob("llamarack-*"))) == 1


async def test_plan_that_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    deployment = parse(
        f"models: [{{name: m, path: {model}, gpus: [], limits: {{context_tokens: 2048, sequences: 999999}}}}]"
    ).deployment
    with pytest.raises(DoesNotFit, match="needs") as caught:
        async with started_rack(deployment, folder=tmp_path / "rack"):
            pass
    assert caught.value.hint is not None
    assert "llamarack plan" in caught.value.hint


@pytest.mark.llamacpp
async def test_engine_that_dies_at_its_start_is_told_once_with_its_log(model: Path, tmp_path: Path) -> None:
    value = plain(_deployment(model))
    value["models"][0]["groups"][0]["env"] = {"PYTHONHOME": "/nowhere"}  # no interpreter starts with this
    started: list[str] = []
    with pytest.raises(StartFailed, match="last lines of") as caught:
        async with started_rack(
            validated(Deployment, value),
            folder=tmp_path / "rack",
            on_entry=lambda entry: started.append(entry.kind),
        ):
            pass
    assert caught.value.exit_code == 5
    assert started.count("starting") == 1  # not tried again
    assert not left_of(tmp_path / "rack")


@pytest.mark.llamacpp
def test_rack_ends_with_its_parent(model: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "rack.yaml", tmp_path / "rack"
    file.write_text(to_yaml(_deployment(model)))
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(file), str(folder)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline())
        assert left_of(folder)  # the proof sees what runs
        parent.kill()
    deadline = time.monotonic() + DEADLINE_S
    while left_of(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left_of(folder)


@pytest.mark.llamacpp
async def test_cancelled_and_killed_racks_leave_nothing(model: Path, tmp_path: Path) -> None:
    ready = asyncio.Event()

    async def hold() -> None:
        async with started_rack(_deployment(model), folder=tmp_path / "rack") as rack:
            os.kill(rack.pid, signal.SIGSTOP)  # it will not obey SIGTERM
            ready.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await asyncio.wait({task, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert left_of(tmp_path / "rack")
    task.cancel()
    await asyncio.sleep(0.1)
    task.cancel()  # a second Ctrl-C does not wait
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(DEADLINE_S):
        while [line for line in left_of(tmp_path / "rack") if not line.startswith("/")]:
            await asyncio.sleep(0.1)


@pytest.mark.llamacpp
async def test_listener_that_fails_ends_the_start(model: Path, tmp_path: Path) -> None:
    def fail(entry: object) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError):
        async with started_rack(_deployment(model), folder=tmp_path / "rack", on_entry=fail):
            pass
    assert not left_of(tmp_path / "rack")


def test_every_error_of_the_tree_comes_back_as_itself() -> None:
    from llamarack.cli.started_rack import _error_of, _tree

    for kind in {each.code: each for each in reversed(list(_tree(LlamarackError)))}.values():
        error = _error_of({"code": kind.code, "message": "what", "hint": "how"})
        assert (type(error), error.message, error.hint) == (kind, "what", "how")
