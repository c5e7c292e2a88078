"""The generated references say what the code does."""

import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from llamarack import cli, config
from llamarack.config.models import MODELS

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "generate.py"))


@pytest.mark.parametrize("name", ["configuration.md", "cli.md"])
def test_reference_is_current(generator: dict[str, Any], name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == generator["pages"]()[name], f"docs/reference/{name} is old: make references"


def test_every_section_of_the_file_is_described(generator: dict[str, Any]) -> None:
    def inside(model: type[BaseModel]) -> set[type[BaseModel]]:
        found = {model}
        for field in model.model_fields.values():
            for each in generator["_models_in"](field.annotation):
                found |= inside(each)
        return found

    assert {model for _, model, _ in generator["_SECTIONS"]} == inside(MODELS[config.Deployment])


def test_every_command_is_described(generator: dict[str, Any]) -> None:
    page = generator["pages"]()["cli.md"]
    for command in cli._COMMANDS:
        assert f"\n## `{command}" in page, command


def test_options_carry_the_names_that_the_command_line_takes(generator: dict[str, Any]) -> None:
    """Each option of the page is one that the commands' own help prints, and the other way round."""
    page = generator["pages"]()["cli.md"]
    app = typer.Typer()
    for name in cli._COMMANDS:
        module = import_module(f"llamarack.cli.{name}")
        if hasattr(module, "app"):
            continue
        app.command(name)(getattr(module, name))
    for name in [str(command.name) for command in app.registered_commands]:
        told = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"}).stdout
        rows = re.findall(r"^[\s│]*(?:-\w,? +)?(--?[a-z][a-z-]*)", told, re.MULTILINE)
        assert "--help" in rows, told
        section = page.split(f"\n## `{name}`\n")[1].split("\n## ")[0]
        listed = set(re.findall(r"`(--?[a-z][a-z-]*)`", section))
        assert set(rows) - {"--help"} <= listed, name
        assert all(option in told for option in listed), name


def test_bounds_choices_and_defaults_are_told(generator: dict[str, Any]) -> None:
    page = generator["pages"]()["configuration.md"]
    for wanted in (
        "| `gpu_memory_fraction` | number > 0, <= 1 | `0.9` |",
        "| `split_mode` | `none`, `layer`, `tensor` | `layer` |",
        "| `name` | text at most 200 characters | required |",
        "| `start_deadline` | `auto` or number > 0 | `auto` |",
        "| `tokenizer` | path or `null` | `null` |",
    ):
        assert wanted in page, wanted
