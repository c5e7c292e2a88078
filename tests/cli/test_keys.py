"""`llamarack keys`: limits are set, shown and taken away; what was used is printed."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamarack.cli.keys import app
from llamarack.errors import ConfigError, UsageError
from llamarack.gateway.keys import KeyFile, read_keys, write_keys
from llamarack.paths import rack_paths


def run(*words: str) -> Any:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_full_disk_leaves_the_file_as_it_was_and_no_half_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    run("add", "app", "--file", str(file))
    before = file.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llamarack.gateway.keys.yaml.safe_dump", full)
    with pytest.raises(OSError, match="No space"):
        write_keys(file, KeyFile(keys=[]))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("keys.yaml")] == ["keys.yaml"]
    assert file.read_bytes() == before


def test_limits_are_set_shown_and_taken_away(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")
    run("add", "app", "--file", file, "--models", "a, b", "--max-parallel", "3")
    (key,) = read_keys(Path(file)).keys
    assert (key.models, key.max_parallel, key.tokens_per_day) == (["a", "b"], 3, None)
    run("set", "app", "--file", file, "--models", "all", "--max-parallel", "0", "--tokens-per-day", "2000000")
    (changed,) = read_keys(Path(file)).keys
    assert changed == key.model_copy(update={"models": None, "max_parallel": None, "tokens_per_day": 2_000_000})
    assert "tokens a day" in run("list", "--file", file).output
    with pytest.raises(UsageError, match="no limit was given"):
        run("set", "app", "--file", file)
    with pytest.raises(UsageError, match="there is no key for `other`"):
        run("set", "other", "--file", file, "--max-parallel", "1")


def test_usage_is_summed_over_workers(tmp_path: Path) -> None:
    folder = rack_paths("r", tmp_path).folder / "usage"
    folder.mkdir(parents=True)
    for worker, count in ((0, 5), (1, 7)):
        use = {"requests": 1, "prompt_tokens": count, "generated_tokens": 2 * count}
        (folder / f"2026-11-30.{worker}.json").write_text(json.dumps({"schema_version": 1, "keys": {"app": use}}))
    words = ("usage", "--rack", "r", "--state-dir", str(tmp_path))
    value = json.loads(run(*words, "--json").output)
    total = {"requests": 2, "prompt_tokens": 12, "generated_tokens": 24}
    assert value == {"schema_version": 1, "days": {"2026-11-30": {"app": total}}}
    assert "app" in run(*words).output


def test_keys_added_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """Each command reads, adds and writes: the second waits for the first."""
    file = str(tmp_path / "keys.yaml")
    names = [f"u{number}" for number in range(8)]
    code = "import sys; from llamarack.cli.keys import app; app(sys.argv[1:])"
    running = [
        subprocess.Popen([sys.executable, "-c", code, "add", name, "--file", file], stdout=subprocess.PIPE)
        for name in names
    ]
    assert [one.communicate(timeout=60)[0][:3] for one in running] == [b"lr-"] * 8
    assert sorted(key.name for key in read_keys(Path(file)).keys) == names
    assert list(tmp_path.iterdir()) == [Path(file)]


@pytest.mark.parametrize("name", ["", "a b", "模型", "x" * 65, "../x"])
def test_name_that_no_key_may_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a key: 1 to 64 letters"):
        run("add", name, "--file", str(tmp_path / "keys.yaml"))


def test_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its folder is not there"):
        run("add", "a", "--file", str(tmp_path / "nowhere" / "keys.yaml"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"keys: [", b"- 1", b"keys: &a [*a]"])
def test_file_that_is_no_keys_file_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        run("list", "--file", str(file))
    assert "\n" not in caught.value.message
    assert caught.value.hint
