"""Every record that other programs read has a schema, and it is one."""

import json

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from llamarack.cli import schema


@pytest.mark.parametrize("record", schema._RECORDS)
def test_the_schema_of_a_record_is_valid(record: str) -> None:
    import typer

    app = typer.Typer()
    app.command()(schema.schema)
    printed = CliRunner().invoke(app, ["--record", record])
    assert printed.exit_code == 0
    value = json.loads(printed.stdout)
    Draft202012Validator.check_schema(value)
    assert "schema_version" in value["properties"]
