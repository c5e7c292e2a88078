"""`llamarack schema`: the JSON schema of the deployment file, or of a record that other programs read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import orjson
import typer

from llamarack import config
from llamarack.cli.console import print_json
from llamarack.errors import UsageError


def _event() -> dict[str, Any]:
    from llamarack.supervise.journal import json_schema

    return json_schema()


def _bench() -> dict[str, Any]:
    from llamarack.measure.result import json_schema

    return json_schema()


def _soak() -> dict[str, Any]:
    from llamarack.measure.soak_result import json_schema

    return json_schema()


_RECORDS: dict[str, Callable[[], dict[str, Any]]] = {
    "deployment": config.json_schema,
    "event": _event,
    "bench": _bench,
}


def schema(
    record: Annotated[str, typer.Option(help=f"Which record: {', '.join(_RECORDS)}.")] = "deployment",
) -> None:
    """Print a JSON schema: of the deployment file, for editors and CI, or of a record."""
    if record not in _RECORDS:
        raise UsageError(f"`--record {record}` is none of {', '.join(_RECORDS)}", hint="--record event")
    print_json(orjson.dumps(_RECORDS[record](), option=orjson.OPT_INDENT_2))
