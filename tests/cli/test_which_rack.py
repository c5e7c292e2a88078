"""A command that measures a file measures that file's rack, and says what chooses a model on its own command line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from llamarack.cli.bench import bench, require_own_rack
from llamarack.cli.facts import chosen_model
from llamarack.cli.verify import verify
from llamarack.config import Deployment, parse
from llamarack.errors import UsageError
from llamarack.supervise.effective import deployment_sha256
from tests.gguf_files import write_llama


def _file(folder: Path, *, context: int = 512, names: tuple[str, ...] = ("m",)) -> tuple[Path, Deployment]:
    folder.mkdir(exist_ok=True)
    model = write_llama(folder.parent / "m.gguf")
    rows = ", ".join(f"{{name: {name}, path: {model}, limits: {{context_tokens: {context}}}}}" for name in names)
    file = folder / "rack.yaml"
    file.write_text(f"models: [{rows}]\n")
    return file, parse(file.read_text(), source=file).deployment


def test_rack_of_another_file_with_the_same_name_is_not_measured(tmp_path: Path) -> None:
    mine, deployment = _file(tmp_path / "mine")
    theirs, other = _file(tmp_path / "theirs", context=1024)
    running = {"rack": "rack", "source": {"path": str(theirs)}, "deployment_sha256": deployment_sha256(other)}
    with pytest.raises(UsageError, match=f"from `{theirs}`, not from `{mine}`") as caught:
        require_own_rack(running, mine, deployment)
    assert "llamarack stop --rack rack" in (caught.value.hint or "")


def test_edit_that_was_not_reloaded_and_a_copy_of_the_file_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, deployment = _file(tmp_path / "mine")
    copy, _ = _file(tmp_path / "copy")
    now = deployment_sha256(deployment)
    require_own_rack({"rack": "rack", "source": {"path": str(mine)}, "deployment_sha256": "before"}, mine, deployment)
    require_own_rack({"rack": "rack", "source": {"path": str(copy)}, "deployment_sha256": now}, mine, deployment)
    require_own_rack({"rack": "rack", "source": None, "deployment_sha256": None}, mine, deployment)
    monkeypatch.chdir(mine.parent)
    require_own_rack({"rack": "rack", "source": {"path": str(mine)}}, Path("rack.yaml"), deployment)


def test_hint_names_the_option_of_the_side(tmp_path: Path) -> None:
    file, deployment = _file(tmp_path / "two", names=("a", "b"))
    with pytest.raises(UsageError) as caught:
        chosen_model(deployment, None)
    assert caught.value.hint == "--model a"
    words = ["--reference", str(file), "--candidate", str(file), "-o", str(tmp_path / "out")]
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(_alone(verify), words, catch_exceptions=False)
    assert caught.value.hint == "--reference-model a"


def test_two_ways_of_loading_exclude_each_other(tmp_path: Path) -> None:
    words = ["http://127.0.0.1:1", "--rate", "3", "--concurrency", "2", "-o", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="exclude each other"):
        CliRunner().invoke(_alone(bench), words, catch_exceptions=False)
    assert not (tmp_path / "out").exists()


def _alone(command: Callable[..., None]) -> typer.Typer:
    app = typer.Typer()
    app.command()(command)
    return app


@pytest.mark.process
@pytest.mark.parametrize("words", [("bench", "http://127.0.0.1:1"), ("soak", "http://127.0.0.1:1")])
def test_run_that_never_began_leaves_no_folder(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llamarack", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert list(tmp_path.iterdir()) == []
