"""From pydantic's faults to one sentence: the key as it was written, its line, what was given, what to type. Pure."""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from llamarack.config.models import MODELS
from llamarack.config.records import Deployment, Group, Model
from llamarack.errors import ConfigError

# Where pydantic speaks of Python.
_WORDS = {
    "model_type": "should be a mapping of keys to values",
    "dict_type": "should be a mapping of keys to values",
    "is_instance_of": "should be a path",
    "string_type": "should be text",
    "string_pattern_mismatch": "has characters that it may not have",
}


def explained(error: ValidationError, where: str, lines: Mapping[str, int]) -> ConfigError:
    """One ConfigError for the first fault; further faults are counted in the hint."""
    faults = error.errors()
    first = min(faults, key=lambda fault: len(fault["loc"]) == 0)
    key = _as_written(_key_of(first["loc"]), lines)
    place = _nearest_line(key, lines)
    given = first.get("input")
    hint: str | None
    if first["type"] == "extra_forbidden":
        message = f"`{key}` is not a known key"
        hint = _nearest_key(first["loc"])
    elif first["type"] == "missing":
        message, hint = f"`{key}` is missing", f"add `{key.rsplit('.', 1)[-1]}:`; llamarack schema describes it"
    elif first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        name, _, rest = text.partition(": ")
        problem, _, advice = rest.partition("; ")
        message = f"`{_join(key, name)}`: {problem}"
        hint = advice or None
        place = _nearest_line(_join(key, name), lines) or place
    else:
        shown = json.dumps(given, default=str, ensure_ascii=False)
        shown = shown if len(shown) < 80 else shown[:77] + "..."
        message = f"`{key}`: {_sentence(faults, _key_of(first['loc']))}, {shown} given"
        hint = _expected(first["loc"])
        if first["type"] == "string_type" and isinstance(given, int | float):
            hint = f'write it in quotes: "{shown}"'
    line = f" line {place}" if place else ""
    others = len({_key_of(fault["loc"]) for fault in faults}) - 1
    if others:
        hint = f"{hint or ''}{'; ' if hint else ''}{others} more fault{'s' if others > 1 else ''} after this one"
    return ConfigError(f"{where}{line}: {message}", hint=hint)


def _sentence(faults: list[Any], key: str) -> str:
    """What the alternatives of a field would have accepted, in words."""
    texts = [_WORDS.get(fault["type"], str(fault["msg"])) for fault in faults if _key_of(fault["loc"]) == key]
    bare = [text.removeprefix("Input ") for text in texts]
    return " or ".join(dict.fromkeys(text[:1].lower() + text[1:] for text in bare))


_DEPLOYMENT, _GROUP, _MODEL = MODELS[Deployment], MODELS[Group], MODELS[Model]
_UNION_TAGS = ("literal[", "constrained-", "function-", "int", "float", "str", "bool", "list[", "nullable")


def _key_of(location: tuple[int | str, ...]) -> str:
    """`models[0].limits.sequences` without pydantic's names of union members."""
    key = ""
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        elif not part.startswith(_UNION_TAGS) or part in _DEPLOYMENT.model_fields:
            key = _join(key, part)
    return key


def _as_written(key: str, lines: Mapping[str, int]) -> str:
    """A flat group is validated as `groups[0]`, which the user never wrote."""
    model, found, rest = key.partition(".groups[0]")
    return model + rest if found and f"{model}.groups" not in lines else key


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _nearest_line(key: str, lines: Mapping[str, int]) -> int | None:
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0] if "." in key else key.rpartition("[")[0]
    return None


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = _DEPLOYMENT
    for part in location:
        if isinstance(part, int) or model is None or part not in model.model_fields:
            continue
        model = _inner_model(model.model_fields[part].annotation)
    return model


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_inner_model, typing.get_args(annotation))), None)


def _nearest_key(location: tuple[int | str, ...]) -> str:
    model = _model_at(location[:-1]) or _DEPLOYMENT
    known = set(model.model_fields) | (set(_GROUP.model_fields) if model is _MODEL else set())
    close = difflib.get_close_matches(str(location[-1]), sorted(known), n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return "known keys here: " + ", ".join(sorted(known))


def _expected(location: tuple[int | str, ...]) -> str | None:
    model: type[BaseModel] | None = _DEPLOYMENT
    description = None
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            description = model.model_fields[part].description or description
            model = _inner_model(model.model_fields[part].annotation)
    return description
