"""A start from plain words is the start that the parser of all commands makes of them, and needs nothing of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamarack.cli import demo_rack, parser, plain_start, serving
from llamarack.supervise.start_words import understood


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What `demo` and `serve` were asked for, in place of what they do."""
    asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def noting(name: str) -> Any:
        def note(*values: Any, **more: Any) -> int:
            asked.append((name, values, more))
            return 7

        return note

    parser.register(None)
    from llamarack.cli import demo, serve

    for module, name in ((demo_rack, "serve_demo"), (demo, "serve_demo"), (serving, "serve_target")):
        monkeypatch.setattr(module, name, noting(name))
    monkeypatch.setattr(serve, "serve_target", noting("serve_target"))
    return asked


@pytest.mark.parametrize(
    "line",
    [
        "demo",
        "demo --once --prompt=Why? --port 0 --replicas 16",
        "demo --model a/b.gguf --rack r --state-dir /s --port 65535",
        "demo --prompt --rack --rack=mine",
        "serve m.gguf",
        "serve --host ::1 --port 81 rack.yaml --rack r --state-dir s --log-format json",
    ],
)
def test_plain_words_start_what_the_parser_would(line: str, starts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    words = line.split()
    assert plain_start.run_plainly(words) == 7
    monkeypatch.setattr(sys, "argv", ["llamarack", *words])
    assert parser.run() == 7
    assert len(starts) == 2
    assert starts[0] == starts[1]


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--help"],
        ["demo", "--replicas", "0"],
        ["demo", "--replicas", "17"],
        ["demo", "--port", "65536"],
        ["demo", "--port", "-1"],
        ["demo", "--port", "x"],
        ["demo", "--port"],
        ["demo", "--host", "::"],
        ["demo", "--on"],
        ["demo", "--prompt", ""],
        ["demo", "more"],
        ["serve"],
        ["serve", "a", "b"],
        ["serve", "a.gguf", "--detach"],
        ["serve", "a.gguf", "--once"],
        ["serve", "a.gguf", "--log-format", "xml"],
        ["status"],
        [],
    ],
)
def test_other_words_are_the_parsers(words: list[str], starts: list[Any]) -> None:
    assert plain_start.run_plainly(words) is None
    assert not starts


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Llama 2 (13B).gguf", "Llama-2--13B-"),
        ("_-.gguf", "model"),
        ("a" * 300 + ".gguf", "a" * 200),
        ("语.gguf", "model"),
    ],
)
def test_any_file_name_gives_a_name_that_clients_can_ask_for(file: str, name: str) -> None:
    words = understood(["demo", f"--model={file}"])
    assert words is not None
    assert words.first_model() == name


@pytest.mark.process
@pytest.mark.parametrize("module", ["llamarack.cli.demo_rack", "llamarack.cli.plain_start", "llamarack.gateway.worker"])
def test_a_start_imports_neither_parser_nor_checker(module: str) -> None:
    """They take as long as all the rest of it."""
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    imported = set(done.stdout.split())
    assert module in imported
    assert not imported & {"typer", "click", "pydantic", "rich.console", "aiohttp", "jinja2", "numpy", "gguf"}
    if "gateway" in module:
        assert not imported & {"yaml", "psutil", "llamarack.engine.adaptor", "llamarack.plan.record"}


def test_missing_model_is_told_in_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llamarack", "demo", "--model", str(tmp_path / "no.gguf"), "--state-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "no.gguf" in done.stderr
    assert "Traceback" not in done.stderr
