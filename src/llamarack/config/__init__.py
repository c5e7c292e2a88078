"""The deployment file: frozen records, where each value came from, errors that name the key and what to type.

`load(path)` reads YAML; nothing is downloaded and no engine is asked. `json_schema()` is `llamarack schema`.
Reading, writing and what checks the values are imported when they are first used: a command that starts a rack, and the
gateway, need the records alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llamarack.config.plain import gateway_from_plain, plain
from llamarack.config.records import (
    SCHEMA_VERSION,
    Defaults,
    Deployment,
    Engine,
    Gateway,
    Group,
    Heartbeat,
    KvDtype,
    Limits,
    Model,
    Record,
    Restarts,
    Supervise,
)

if TYPE_CHECKING:
    from llamarack.config.models import validated
    from llamarack.config.reading import LoadedDeployment, from_value, load, parse
    from llamarack.config.writing import json_schema, to_yaml

__all__ = [
    "SCHEMA_VERSION",
    "Defaults",
    "Deployment",
    "Engine",
    "Gateway",
    "Group",
    "Heartbeat",
    "KvDtype",
    "Limits",
    "LoadedDeployment",
    "Model",
    "Record",
    "Restarts",
    "Supervise",
    "from_value",
    "gateway_from_plain",
    "json_schema",
    "load",
    "parse",
    "plain",
    "to_yaml",
    "validated",
]

_LATER = {
    "validated": "models",
    "LoadedDeployment": "reading",
    "from_value": "reading",
    "load": "reading",
    "parse": "reading",
    "json_schema": "writing",
    "to_yaml": "writing",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value
