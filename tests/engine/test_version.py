"""Which version a group runs, asked of the installation."""

import stat
from importlib.metadata import version
from pathlib import Path

import pytest

from llamarack.config import Group
from llamarack.engine.version import engine_version


def test_built_in_llama_cpp_is_the_wheel() -> None:
    assert engine_version(Group()) == version("xllamacpp")


@pytest.mark.process
@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("version: 11434 (4cb46c10a)", "b11434"),
        ("version: 0.6.0-dev (build 0, commit unknown)", None),
        ("", None),
    ],
)
def test_binary_says_its_build(tmp_path: Path, said: str, known: str | None) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    assert engine_version(Group(engine_binary=binary)) == known


def test_engine_that_is_not_there_has_no_version(tmp_path: Path) -> None:
    assert engine_version(Group(engine_binary=tmp_path / "nothing")) is None
    assert engine_version(Group(engine="vllm", engine_python=tmp_path / "python")) is None
