"""What a bundle needs is found for the target's Python and platform, not for the machine that makes it."""

import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

import llamarack
from llamarack.errors import UsageError
from llamarack.ship.own_wheel import own_wheel, repacked, source_tree
from llamarack.ship.target import Target, target_of
from llamarack.ship.wheelhouse import collect, lock_text, missing_requirements
from tests.ship.wheels import write_wheel

OTHER = Target(python="3.13", machine="aarch64", glibc_minor=28, is_here=False)


def test_target_follows_the_options() -> None:
    assert target_of(None, None).is_here
    made = target_of("3.12", "manylinux_2_34_aarch64")
    assert made == Target(python="3.12", machine="aarch64", glibc_minor=34, is_here=False)
    assert target_of(None, "manylinux2014_x86_64").glibc_minor == 17
    assert target_of("3.13", "x86_64").platform == "manylinux_2_28_x86_64"
    options = made.pip_options
    assert {"manylinux_2_34_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= set(options)
    assert "manylinux_2_35_aarch64" not in options


@pytest.mark.parametrize(
    ("python", "platform", "named"),
    [("3.10", None, "3.11 or newer"), ("cp312", None, "written as 3.11"), (None, "win_amd64", "--platform win_amd64")],
)
def test_wrong_target_is_refused_with_the_form(python: str | None, platform: str | None, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        target_of(python, platform)
    assert caught.value.hint


def test_markers_are_judged_for_the_target() -> None:
    metadata = {
        "a": ["b>=2", "old; python_version < '3.12'", "arm[fast]; platform_machine == 'aarch64'", "x; extra == 'more'"],
        "b": ["A", "win; sys_platform == 'win32'"],
    }
    assert missing_requirements(metadata, ["a"], OTHER.markers) == ["arm[fast]"]
    assert missing_requirements(metadata, ["a[more]"], target_of("3.11", "x86_64").markers) == ["x", "old"]
    with_extra = {"a": ["c[fast]"], "c": ["quick>=1; extra == 'fast'"]}
    assert missing_requirements(with_extra, ["a"], OTHER.markers) == ["quick>=1"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own pip settings: a folder of wheels and no index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


@pytest.mark.process
def test_wheels_of_another_platform_are_fetched_with_what_only_it_needs(index: Path, tmp_path: Path) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    other = "3.13" if here != "3.13" else "3.12"
    target = Target(python=other, machine="aarch64", glibc_minor=28, is_here=False)
    code = other.replace(".", "")
    only_there = f"late; python_version == '{other}' and platform_machine == 'aarch64'"
    write_wheel(index, "engine", "1.0", {"engine.py": ""}, requires=["native", "torchvision", only_there])
    write_wheel(index, "native", "2.0+cpu", {"n.py": ""}, tag=f"cp{code}-cp{code}-manylinux_2_27_aarch64")
    write_wheel(index, "native", "2.1", {"n.py": ""}, tag=f"cp{code}-cp{code}-manylinux_2_99_aarch64")
    write_wheel(index, "late", "3.0", {"late.py": ""}, requires=["deeper>=1"])
    write_wheel(index, "deeper", "1.5", {"deeper.py": ""})
    write_wheel(index, "torchvision", "0.1", {"t.py": ""})
    folder = tmp_path / "wheels"
    folder.mkdir()
    found = collect(["engine==1.0"], target, folder, without=["torchvision"], tell=lambda _: None)
    assert [(wheel.name, wheel.version) for wheel in found] == [
        ("deeper", "1.5"),
        ("engine", "1.0"),
        ("late", "3.0"),
        ("native", "2.0+cpu"),
    ]
    lines = lock_text(found).splitlines()
    assert lines[3].startswith("native==2.0+cpu --hash=sha256:")


@pytest.mark.process
def test_what_pip_says_is_what_the_user_reads(index: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pip said: .*No matching distribution found for nothing") as caught:
        collect(["nothing==1"], OTHER, tmp_path, tell=lambda _: None)
    assert "PIP_INDEX_URL" in str(caught.value.hint)


@pytest.mark.process
def test_installed_files_give_the_wheel_they_came_from(index: Path, tmp_path: Path) -> None:
    original = write_wheel(
        index, "llamarack", "9.9", {"llamarack/__init__.py": "x = 1\n", "llamarack/data/a.txt": "é"},
        scripts={"llamarack": "llamarack:main"},
    )  # fmt: skip
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), str(original)]
    subprocess.run(pip, check=True, timeout=120)
    (site / "llamarack" / "left_by_somebody.py").write_text("")
    wheel = repacked(PathDistribution(site / "llamarack-9.9.dist-info"), tmp_path)
    with zipfile.ZipFile(original) as before, zipfile.ZipFile(wheel) as after:
        names = {name for name in before.namelist() if not name.endswith("RECORD")}
        assert {name for name in after.namelist() if not name.endswith("RECORD")} == names
        assert all(before.read(name) == after.read(name) for name in names)
    (site / "llamarack" / "data" / "a.txt").unlink()
    with pytest.raises(UsageError, match=r"data/a\.txt"):
        repacked(PathDistribution(site / "llamarack-9.9.dist-info"), tmp_path)


@pytest.mark.process
def test_wheel_of_the_source_tree_holds_every_file_of_the_package(tmp_path: Path) -> None:
    """What is not Python (data, scripts of other interpreters, assets) is easily forgotten in package-data."""
    root = source_tree()
    if root is None:
        pytest.skip("llamarack runs from an installed wheel here; PYTHONPATH=src runs the tree")
    (tmp_path / "out").mkdir()
    wheel = own_wheel(tmp_path / "out", tmp_path)
    package = Path(llamarack.__file__).parent
    wanted = {
        f"llamarack/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())
    assert not (root / "build" / "lib").exists()
