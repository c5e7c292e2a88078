"""The deployment file as others read it: its JSON schema, and the YAML of a deployment."""

from __future__ import annotations

from typing import Any

import yaml

from llamarack.config.models import MODELS
from llamarack.config.plain import plain
from llamarack.config.records import SCHEMA_VERSION, Deployment, Model


def json_schema() -> dict[str, Any]:
    """JSON schema of the deployment file, for editors and CI."""
    schema = MODELS[Deployment].model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    model = schema["$defs"]["Model"]
    group = schema["$defs"]["Group"]
    for key, field in group["properties"].items():
        model["properties"].setdefault(key, field)  # one group may be written flat
    model["required"] = [key for key in model["required"] if key != "groups"]
    return schema


def to_yaml(deployment: Deployment) -> str:
    """The file again, without what equals the defaults; `load` reads it back to an equal Deployment."""
    data = plain(deployment, without_defaults=True)
    for model in data["models"]:
        if len(model["groups"]) == 1 and not set(model["groups"][0]) & set(MODELS[Model].model_fields):
            model.update(model.pop("groups")[0])
    return yaml.safe_dump({"schema_version": SCHEMA_VERSION, **data}, sort_keys=False, allow_unicode=True)
