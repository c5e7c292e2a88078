"""`llamarack keys`: limits are set, shown and taken away; what was used is printed."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamarack.cli.keys import app
from llamarack.errors import UsageError
from llamarack.gateway.keys import read_keys
from llamarack.paths import rack_paths


def run(*words: str) -> Any:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


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
