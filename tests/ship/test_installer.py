"""The installer as a server meets it: `sh install.sh` with a bare Python, from bundles of small wheels."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamarack.ship.installer import command_line, program
from tests.ship.wheels import write_bundle

pytestmark = pytest.mark.process


def _sh(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    # PIP_INDEX_URL: a server's pip settings, meant for another network, must not matter.
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "PYTHON": sys.executable,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_REQUIRE_VIRTUALENV": "1",
        **(env or {}),
    }
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=240, env=environment, check=False)


def _install(bundle: Path, prefix: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return _sh("sh", bundle / "install.sh", "--prefix", prefix, *words)


def _version(prefix: Path) -> str:
    return _sh(prefix / "bin" / "llamarack").stdout.strip()


def test_upgrade_lies_beside_the_old_one_until_it_is_accepted_or_undone(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    command = prefix / "bin" / "llamarack-install"
    write_bundle(tmp_path / "one", "1.0", models={"m.gguf": b"weights", "folder/config.json": b"{}"})
    digest = write_bundle(tmp_path / "two", "2.0", models={"m.gguf": b"weights", "new.gguf": b"new"})

    first = _install(tmp_path / "one", prefix)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{prefix}/bin/llamarack\n"
    assert _version(prefix) == "llamarack 1.0"
    assert (prefix / "models" / "folder" / "config.json").read_bytes() == b"{}"
    assert _sh(command, "undo").returncode == 2  # nothing to go back to

    assert _install(tmp_path / "two", prefix, "--expect", digest).returncode == 0
    assert _version(prefix) == "llamarack 2.0"
    assert len(list((prefix / "versions").iterdir())) == 2
    undone = _sh(command, "undo")
    assert undone.returncode == 0, undone.stderr
    assert _version(prefix) == "llamarack 1.0"
    assert sorted(path.name for path in (prefix / "models").iterdir()) == ["folder", "m.gguf"]

    assert _install(tmp_path / "two", prefix).returncode == 0
    accepted = _sh(command, "accept")
    assert accepted.returncode == 0, accepted.stderr
    assert _version(prefix) == "llamarack 2.0"
    assert [path.name for path in (prefix / "versions").iterdir()] == [f"2.0-{digest[:8]}"]
    assert sorted(path.name for path in (prefix / "models").iterdir()) == ["m.gguf", "new.gguf"]

    assert _sh(command, "uninstall").returncode == 0
    assert not prefix.exists()


def test_program_is_one_file_that_needs_nothing_but_python_and_leaves_nothing(tmp_path: Path) -> None:
    one, two = tmp_path / "a" / program.FILE, tmp_path / "b" / program.FILE
    for file in (one, two):
        file.parent.mkdir()
        program.write(file)
    assert one.read_bytes() == two.read_bytes()
    shown = _sh(sys.executable, "-I", "-S", one, "--help")  # -S: without any installed package, ours among them
    assert shown.returncode == 0, shown.stderr
    assert "--expect SHA256" in shown.stdout
    assert [path.name for path in one.parent.iterdir()] == [program.FILE]


def test_install_works_read_only_and_is_still_removed(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    write_bundle(tmp_path / "one", "1.0")
    assert _install(tmp_path / "one", prefix).returncode == 0
    subprocess.run(["chmod", "-R", "a-w", str(prefix / "versions")], check=True)
    assert _version(prefix) == "llamarack 1.0"
    assert _install(tmp_path / "one", prefix, "uninstall").returncode == 0
    assert not prefix.exists()


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda bundle: (bundle / "models" / "m.gguf").write_bytes(b"weightz"), "models/m.gguf: its SHA-256"),
        (lambda bundle: (bundle / "llamarack.txt").unlink(), "llamarack.txt: missing"),
        (
            lambda bundle: (bundle / "wheels" / "evil-9-py3-none-any.whl").write_bytes(b""),
            "evil-9-py3-none-any.whl: not",
        ),
        (lambda bundle: (bundle / "bundle.json").write_text((bundle / "bundle.json").read_text() + " "), "bundle.json"),
    ],
)
def test_damaged_bundle_is_refused_by_name_and_nothing_is_current(tmp_path: Path, harm: object, named: str) -> None:
    bundle = tmp_path / "one"
    write_bundle(bundle, "1.0", models={"m.gguf": b"weights"})
    assert _install(bundle, tmp_path / "prefix", "verify").returncode == 0
    harm(bundle)  # type: ignore[operator]
    assert named in _install(bundle, tmp_path / "prefix", "verify").stderr
    done = _install(bundle, tmp_path / "prefix")
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "prefix" / "current").exists()
    assert not list((tmp_path / "prefix").glob("versions/*"))


def test_another_bundle_than_the_expected_is_refused(tmp_path: Path) -> None:
    write_bundle(tmp_path / "one", "1.0")
    done = _install(tmp_path / "one", tmp_path / "prefix", "--expect", "0" * 64)
    assert done.returncode == 2
    assert "--expect" in done.stderr
    assert not (tmp_path / "prefix").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"python": "3.99"}, "bundle is for Python 3.99"),
        ({"machine": "riscv64"}, "bundle is for riscv64"),
        ({"glibc": "2.99"}, "needs glibc 2.99"),
        ({"app": {"lock": "llamarack.txt", "unpacked_bytes": 1 << 60}}, "GB are needed"),
    ],
)
def test_machine_that_does_not_fit_is_exit_3_with_what_to_type(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    write_bundle(tmp_path / "one", "1.0", **change)
    done = _install(tmp_path / "one", tmp_path / "prefix")
    assert done.returncode == 3
    assert named in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_version_that_does_not_start_leaves_the_old_one_in_use(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    write_bundle(tmp_path / "one", "1.0")
    write_bundle(tmp_path / "two", "2.0", exit_code=7)
    assert _install(tmp_path / "one", prefix).returncode == 0
    done = _install(tmp_path / "two", prefix)
    assert done.returncode == 5
    assert "llamarack does not start" in done.stderr
    assert _version(prefix) == "llamarack 1.0"
    assert len(list((prefix / "versions").iterdir())) == 1


def test_model_of_the_same_name_with_other_contents_is_not_replaced(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    write_bundle(tmp_path / "one", "1.0", models={"m.gguf": b"weights"})
    write_bundle(tmp_path / "two", "2.0", models={"m.gguf": b"others!"})
    assert _install(tmp_path / "one", prefix).returncode == 0
    done = _install(tmp_path / "two", prefix)
    assert done.returncode == 2
    assert "another name" in done.stderr
    assert _version(prefix) == "llamarack 1.0"
    assert (prefix / "models" / "m.gguf").read_bytes() == b"weights"


def test_models_and_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    write_bundle(tmp_path / "one", "1.0", models={"m.gguf": b"weights"})
    write_bundle(tmp_path / "two", "2.0")
    assert _install(tmp_path / "one", prefix).returncode == 0
    (prefix / "models" / "own.gguf").write_bytes(b"put here by hand")
    assert _install(tmp_path / "two", prefix).returncode == 0
    assert _sh(prefix / "bin" / "llamarack-install", "accept").returncode == 0
    assert [path.name for path in (prefix / "models").iterdir()] == ["own.gguf"]
    assert _sh(prefix / "bin" / "llamarack-install", "uninstall").returncode == 0
    assert [str(path.relative_to(prefix)) for path in sorted(prefix.rglob("*"))] == ["models", "models/own.gguf"]

    project = tmp_path / "project"
    (project / "versions" / "of-somebody").mkdir(parents=True)
    for words in ((), ("uninstall",)):
        done = _install(tmp_path / "one", project, *words)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    assert f"--prefix {project}/llamarack" in _install(tmp_path / "one", project).stderr
    assert [path.name for path in project.rglob("*")] == ["versions", "of-somebody"]


def test_what_still_runs_is_not_pulled_away(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    write_bundle(tmp_path / "one", "1.0")
    assert _install(tmp_path / "one", prefix).returncode == 0
    python = next((prefix / "versions").glob("*/python/bin/python"))
    with subprocess.Popen([str(python), "-c", "import time; time.sleep(300)"]) as running:
        try:
            done = _sh(prefix / "bin" / "llamarack-install", "uninstall")
        finally:
            running.kill()
    assert done.returncode == 2
    assert f"process {running.pid} runs from" in done.stderr
    assert _version(prefix) == "llamarack 1.0"


def test_disk_that_fills_up_in_the_middle_of_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llamarack.ship.installer.command_line.Bundle", fill)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "install.sh"), "--prefix", str(tmp_path / "there")])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    umask = os.umask(0o022)
    try:
        with pytest.raises(SystemExit) as end:
            command_line.main()
    finally:
        os.umask(umask)
    told = capsys.readouterr()
    assert end.value.code == 3
    assert f"`{tmp_path / 'there'}`: No space left on device" in told.out + told.err
