"""Paths in a deployment file: relative to its folder, and there when it is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from llamarack.config.models import Deployment
from llamarack.errors import ConfigError


def resolved(deployment: Deployment, base: Path | None) -> Deployment:
    if base is None:
        return deployment

    def resolve(value: Path | None) -> Path | None:
        return None if value is None else (base / value.expanduser()).absolute()

    models = [
        model.model_copy(
            update={
                "path": resolve(model.path),
                "tokenizer": resolve(model.tokenizer),
                "fallbacks": [resolve(path) for path in model.fallbacks],
                "groups": [
                    group.model_copy(
                        update={key: resolve(getattr(group, key)) for key in ("path", "engine_python", "engine_binary")}
                    )
                    for group in model.groups
                ],
            }
        )
        for model in deployment.models
    ]
    gateway = deployment.gateway.model_copy(
        update={key: resolve(getattr(deployment.gateway, key)) for key in ("api_keys_file", "tls_cert", "tls_key")}
    )
    return deployment.model_copy(update={"models": models, "gateway": gateway})


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
