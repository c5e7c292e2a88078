"""`llamarack schema`: the JSON schema of the deployment file, or of a record that other programs read."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import orjson
import typer

from llamarack.cli.console import print_json
from llamarack.errors import UsageError

# Records by name, each with the module whose `json_schema()` describes it; imported when it is asked for.
_RECORDS = {
    "deployment": "llamarack.config",
    "event": "llamarack.supervise.journal",
    "bench": "llamarack.measure.result",
    "tune": "llamarack.measure.tune_record",
    "soak": "llamarack.measure.soak_result",
    "verify": "llamarack.judge.verify_record",
    "compare": "llamarack.judge.compare_record",
    "acceptance": "llamarack.judge.acceptance",
}


def schema(
    record: Annotated[str, typer.Option(help=f"Which record: {', '.join(_RECORDS)}.")] = "deployment",
) -> None:
    """Print the JSON schema of the deployment file or of a record. For editors and CI."""
    if record not in _RECORDS:
        raise UsageError(f"`--record {record}` is none of {', '.join(_RECORDS)}", hint="--record event")
    print_json(orjson.dumps(import_module(_RECORDS[record]).json_schema(), option=orjson.OPT_INDENT_2))
