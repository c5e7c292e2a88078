"""The deployment file: strict models, where each value came from, errors that name the key and what to type.

`load(path)` reads YAML; nothing is downloaded and no engine is asked. `json_schema()` is `llamarack schema`.
"""

from llamarack.config.models import (
    SCHEMA_VERSION,
    Defaults,
    Deployment,
    Engine,
    Gateway,
    Group,
    Heartbeat,
    Limits,
    Model,
    Restarts,
    Supervise,
)
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
    "Limits",
    "LoadedDeployment",
    "Model",
    "Restarts",
    "Supervise",
    "from_value",
    "json_schema",
    "load",
    "parse",
    "to_yaml",
]
