"""`llamarack schema`: the JSON schema of the deployment file."""

from __future__ import annotations

import orjson

from llamarack import config
from llamarack.cli.console import print_json


def schema() -> None:
    """Print the JSON schema of the deployment file, for editors and CI."""
    print_json(orjson.dumps(config.json_schema(), option=orjson.OPT_INDENT_2))
