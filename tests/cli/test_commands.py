"""Commands as a user meets them: exit code, stdout, stderr; never a traceback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from llamarack.cli import console
from llamarack.errors import StartFailed, UsageError
from llamarack.version import __version__

pytestmark = pytest.mark.process


def _run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LLAMARACK_STATE_DIR": str(tmp_path / "state"), "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "llamarack", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=tmp_path,
        check=False,
    )


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rack.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "named", "hint"),
    [
        (
            "models: [{name: a, path: x.gguf, limts: {}}]",
            "`models[0].limts` is not a known key",
            "did you mean `limits`?",
        ),
        ("models: [{name: a, path: x.gguf, replicas: two}]", "`models[0].replicas`", '"two" given'),
        ("models: [{name: a, path: x.gguf}]", "`models[0].path`: `", "is not there"),
        ("models: []", "`models`", "[] given"),
        ("gateway: {host: 0.0.0.0}\nmodels: [{name: a, path: x.gguf}]", "`gateway.host`", "llamarack keys add"),
        ("models: [{name: a, path: x.gguf}", "line 1", "hint"),
    ],
)
def test_wrong_deployment_file_is_exit_2_with_the_key_and_what_to_type(
    tmp_path: Path, text: str, named: str, hint: str
) -> None:
    done = _run(tmp_path, "serve", str(_file(tmp_path, text)))
    assert done.returncode == 2
    assert named in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_file_that_is_no_model_is_exit_2(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"<!DOCTYPE html><html>not found</html>")
    done = _run(tmp_path, "serve", str(_file(tmp_path, "models: [{name: a, path: x.gguf}]")))
    assert done.returncode == 2
    assert "x.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_taken_port_is_exit_2_and_names_the_key_and_another_port(tmp_path: Path) -> None:
    from tests.tiny_model import write_tiny_llama

    write_tiny_llama(tmp_path / "x.gguf")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        model = "{name: a, path: x.gguf, limits: {context_tokens: 256, sequences: 1}}"
        text = f"models: [{model}]\ngateway: {{port: {port}}}"
        done = _run(tmp_path, "serve", str(_file(tmp_path, text)))
    assert done.returncode == 2, done.stderr
    assert "`gateway.port`" in done.stderr
    assert f"--port {port + 1}" in done.stderr


def test_schema_accepts_the_readmes_file_flat_groups_included(tmp_path: Path) -> None:
    done = _run(tmp_path, "schema")
    assert done.returncode == 0
    schema = json.loads(done.stdout)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = readme.split("```yaml\n")[1].split("```")[0]
    jsonschema.validate(yaml.safe_load(example), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema_version": 1, "models": [{"name": "a"}]}, schema)


def test_keys_are_shown_once_kept_as_hashes_and_revoked(tmp_path: Path) -> None:
    added = _run(tmp_path, "keys", "add", "alice")
    key = added.stdout.strip()
    assert added.returncode == 0
    assert key.startswith("lr-")
    kept = (tmp_path / "keys.yaml").read_text()
    assert key not in kept
    assert (tmp_path / "keys.yaml").stat().st_mode & 0o777 == 0o600
    assert _run(tmp_path, "keys", "list").stdout.startswith("alice\t")
    again = _run(tmp_path, "keys", "add", "alice")
    assert again.returncode == 2
    assert "revoke alice" in again.stderr
    assert _run(tmp_path, "keys", "revoke", "alice").returncode == 0
    assert _run(tmp_path, "keys", "list").stdout == ""


@pytest.mark.parametrize("words", [["status"], ["stop"], ["drain"], ["status", "--rack", "mine"]])
def test_commands_without_a_rack_are_exit_5(tmp_path: Path, words: list[str]) -> None:
    done = _run(tmp_path, *words)
    assert done.returncode == 5
    assert "is running" in done.stderr
    assert "llamarack serve" in done.stderr


def test_bench_of_an_address_without_a_scheme_says_what_to_type(tmp_path: Path) -> None:
    done = _run(tmp_path, "bench", "127.0.0.1:8080")
    assert done.returncode == 2
    assert "bench http://127.0.0.1:8080" in done.stderr


def test_unknown_command_names_the_nearest(tmp_path: Path) -> None:
    done = _run(tmp_path, "serv")
    assert done.returncode == 2
    assert "serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_bare_command_prints_its_help(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert "serve" in done.stdout + done.stderr
    assert "error" not in done.stderr


def test_detached_rack_whose_start_fails_ends_as_it_would_have_and_is_never_ready(tmp_path: Path) -> None:
    from tests.tiny_model import write_tiny_llama

    write_tiny_llama(tmp_path / "x.gguf")
    limits = "limits: {context_tokens: 256, sequences: 1}"
    text = f"models: [{{name: a, path: x.gguf, {limits}, engine_args: {{n_foo: 1}}}}]\ngateway: {{port: 0}}"
    done = _run(tmp_path, "serve", str(_file(tmp_path, text)), "--detach")
    assert done.returncode == StartFailed.exit_code
    assert "engine_args.n_foo is no option of this llama.cpp" in done.stderr
    assert sum(line.startswith("error:") for line in done.stderr.splitlines()) == 1
    assert "ready  http" not in done.stderr


def test_detached_rack_that_is_refused_ends_with_the_same_code_as_without_detach(tmp_path: Path) -> None:
    words = ("serve", str(_file(tmp_path, "models: [{name: a, path: x.gguf}]")))
    done, detached = _run(tmp_path, *words), _run(tmp_path, *words, "--detach")
    assert done.returncode == detached.returncode == UsageError.exit_code
    assert detached.stderr.count("error:") == 1
    assert "x.gguf" in detached.stderr


@pytest.mark.parametrize(
    ("program", "path", "shown"),
    [
        (".venv/bin/llamarack", "/nowhere", ".venv/bin/llamarack status --rack demo"),
        ("/x/bin/llamarack", None, "llamarack status --rack demo"),
        ("/x/llamarack/__main__.py", "/nowhere", "llamarack status --rack demo"),
    ],
)
def test_hints_can_be_typed_where_the_environment_is_not_activated(
    program: str, path: str | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llamarack").touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [program, "status"])
    monkeypatch.setenv("PATH", path or str(tmp_path))
    assert console.typed("llamarack status --rack demo") == shown
    assert console.typed("ls -la") == "ls -la"


def test_command_that_ends_does_not_look_through_its_modules_again() -> None:
    """The interpreter's last collection took 0.1 s of every command."""
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print('kept', gc.get_freeze_count() > 10_000)); "
        "sys.argv = ['llamarack', '--version']; from llamarack.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-2:] == ["kept", "True"]


def test_version_is_told_without_importing_a_command() -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print('llamarack.cli.plan' in sys.modules)); "
        "sys.argv = ['llamarack', '--version']; from llamarack.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    version, is_imported = done.stdout.splitlines()
    assert version == f"llamarack {__version__}"
    assert is_imported == "False"


def test_ctrl_c_while_a_command_is_imported_shows_no_traceback(tmp_path: Path) -> None:
    """The signal comes while Python reads the module of a library that the command needs."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", "llamarack", "status"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("words", [(), ("engine",), ("keys",), ("export",)])
def test_no_summary_of_a_command_is_cut(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The first sentence of each command stands whole in the list, on a terminal of 80 columns."""
    done = _run(tmp_path, *words, "--help")
    assert done.returncode == 0
    listed = done.stdout.partition("Commands:")[2]
    assert listed
    assert "..." not in listed
