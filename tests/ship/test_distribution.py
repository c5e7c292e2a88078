"""An sdist and a wheel made of it, installed into a clean environment: the commands start, their data is there."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not a checkout; run it from the source tree"),
]
# In a process with the build backend beside it: pip keeps its build environments to itself.
_SDIST = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"


def _python(folder: Path) -> str:
    venv.create(folder, with_pip=True, symlinks=True)
    return str(folder / "bin" / "python")


def _run(*words: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=280, check=False, cwd=cwd, env={**environment, "HOME": str(cwd)}
    )
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip(f"no index here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_sdist_gives_a_wheel_that_installs_clean(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree / name)
    shutil.copytree(
        ROOT / "src" / "llamarack", tree / "src" / "llamarack", ignore=shutil.ignore_patterns("__pycache__")
    )
    builder = _python(tmp_path / "builder")
    _run(builder, "-m", "pip", "install", "--quiet", "setuptools>=77", cwd=tmp_path)
    name = _run(builder, "-c", _SDIST, str(tmp_path), cwd=tree).splitlines()[-1]
    with tarfile.open(tmp_path / name) as archive:
        held = {entry.name.partition("/")[2] for entry in archive.getmembers()}
    wanted = {str(path.relative_to(tree)) for path in (tree / "src" / "llamarack").rglob("*") if path.is_file()}
    assert wanted | {"LICENSE", "README.md", "pyproject.toml"} <= held
    assert not any("__pycache__" in entry for entry in held)

    wheel_command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    _run(builder, *wheel_command, str(tmp_path / name), cwd=tmp_path)
    (wheel,) = tmp_path.glob("llamarack-*.whl")
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        names = set(archive_of_wheel.namelist())
    assert {path.removeprefix("src/") for path in wanted} <= names
    assert not any(path.startswith(("tests/", "benchmarks/")) for path in names)

    clean = _python(tmp_path / "clean")
    _run(clean, "-m", "pip", "install", "--quiet", str(wheel), cwd=tmp_path)
    _run(clean, "-m", "pip", "check", cwd=tmp_path)
    command = str(tmp_path / "clean" / "bin" / "llamarack")
    assert _run(command, "--version", cwd=tmp_path).startswith("llamarack ")
    assert '"$schema"' in _run(command, "schema", cwd=tmp_path)
    assert "7B" in _run(command, "plan", "--table", "llama2", cwd=tmp_path)
    template = "from llamarack.engine.chat_template import template_text; print(len(template_text('llama-2')))"
    assert int(_run(clean, "-c", template, cwd=tmp_path)) > 100
    assert sys.version_info >= (3, 11)
