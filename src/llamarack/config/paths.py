"""Paths in a deployment file: relative to its folder, and there when it is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llamarack.config.records import Deployment, Group
from llamarack.errors import ConfigError


def resolved(deployment: Deployment, base: Path | None) -> Deployment:
    if base is None:
        return deployment

    def placed(path: Path) -> Path:
        return (base / path.expanduser()).absolute()

    def resolve(path: Path | None) -> Path | None:
        return None if path is None else placed(path)

    def of_group(group: Group) -> Group:
        return replace(
            group,
            path=resolve(group.path),
            engine_python=resolve(group.engine_python),
            engine_binary=resolve(group.engine_binary),
        )

    models = [
        replace(
            model,
            path=placed(model.path),
            tokenizer=resolve(model.tokenizer),
            fallbacks=[placed(path) for path in model.fallbacks],
            groups=[of_group(group) for group in model.groups],
        )
        for model in deployment.models
    ]
    gateway = replace(
        deployment.gateway,
        api_keys_file=resolve(deployment.gateway.api_keys_file),
        tls_cert=resolve(deployment.gateway.tls_cert),
        tls_key=resolve(deployment.gateway.tls_key),
    )
    return replace(deployment, models=models, gateway=gateway)


def require_paths(deployment: Deployment, source: Path | None, lines: Mapping[str, int]) -> None:
    """Raises ConfigError for the first file that is not there, with its key, its line and the nearest name."""
    for index, model in enumerate(deployment.models):
        wanted = [(f"models[{index}].path", model.path), (f"models[{index}].tokenizer", model.tokenizer)]
        wanted += [(f"models[{index}].fallbacks[{i}]", path) for i, path in enumerate(model.fallbacks)]
        is_flat = f"models[{index}].groups" not in lines
        for number, group in enumerate(model.groups):
            prefix = f"models[{index}]" if is_flat else f"models[{index}].groups[{number}]"
            wanted += [(f"{prefix}.{key}", getattr(group, key)) for key in ("path", "engine_python", "engine_binary")]
        for key, path in wanted:
            if path is not None and not path.exists():
                raise _missing_path(source, lines.get(key), key, path)
    for name in ("api_keys_file", "tls_cert", "tls_key"):
        path = getattr(deployment.gateway, name)
        if path is not None and not path.exists():
            raise _missing_path(source, lines.get(f"gateway.{name}"), f"gateway.{name}", path)


def _missing_path(source: Path | None, line: int | None, key: str, path: Path) -> ConfigError:
    parent = path.parent
    hint = f"folder `{parent}` is not there either"
    if parent.is_dir():
        close = difflib.get_close_matches(path.name, sorted(item.name for item in parent.iterdir())[:2000], n=1)
        hint = f"did you mean `{parent / close[0]}`?" if close else f"ls {parent}"
    where = f"{source} line {line}: " if line else ""
    return ConfigError(f"{where}`{key}`: `{path}` is not there", hint=hint)
