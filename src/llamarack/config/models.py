"""The records of the deployment file as pydantic validates them: strict, unknown keys are errors, with every bound.

Built from the records, which hold keys, defaults and meaning; their types name kinds of values, whose bounds are here.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from llamarack.config import records

R = TypeVar("R", bound=records.Record)

# By the name that the records use.
_KINDS: dict[str, Any] = {
    "Count": Annotated[int, Field(ge=1, le=2**31 - 1)],  # what engines keep in 32 bits
    "Bytes": Annotated[int, Field(ge=1)],
    "Replicas": Annotated[int, Field(ge=1, le=256)],
    "Natural": Annotated[int, Field(ge=0)],
    "Port": Annotated[int, Field(ge=0, le=65535)],
    "Workers": Annotated[int, Field(ge=1, le=64)],
    "Fraction": Annotated[float, Field(gt=0, le=1)],
    "Share": Annotated[float, Field(ge=0)],
    "Seconds": Annotated[float, Field(gt=0)],
    "DrainSeconds": Annotated[float, Field(ge=0)],
    "HeartbeatSeconds": Annotated[float, Field(ge=1, le=60)],
    "Temperature": Annotated[float, Field(ge=0, le=2)],
    "ModelName": Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")],
    "FilePath": Annotated[Path, BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value)],
}
_LEAST_ITEMS = {(records.Model, "groups"): 1, (records.Deployment, "models"): 1}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    record_type: ClassVar[type[records.Record]]

    def record(self) -> records.Record:
        return self.record_type(**{name: _recorded(getattr(self, name)) for name in type(self).model_fields})

    @model_validator(mode="after")
    def _consistent(self) -> _Strict:
        self.record().check()
        return self


class _Flat(_Strict):
    """Of a model: its one group may be written without `groups:`."""

    @model_validator(mode="before")
    @classmethod
    def _one_group_may_be_flat(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        of_group = {field.name for field in dataclasses.fields(records.Group)}
        flat = {key: value[key] for key in value if key in of_group and key not in cls.model_fields}
        rest = {key: value[key] for key in value if key not in flat}
        if "groups" not in value:
            return {**rest, "groups": [flat]}
        if flat:
            raise ValueError(f"{sorted(flat)[0]}: stands beside `groups`; move it into a group")
        return value


def _recorded(value: Any) -> Any:
    if isinstance(value, _Strict):
        return value.record()
    return [_recorded(each) for each in value] if isinstance(value, list) else value


def _built(record: type[records.Record], known: dict[str, Any]) -> type[_Strict]:
    """`known`: what the names in the record's annotations mean here: kinds, and the models of what it holds."""
    hints = typing.get_type_hints(record, vars(records), known, include_extras=True)
    fields: dict[str, Any] = {}
    for each in dataclasses.fields(record):  # type: ignore[arg-type]  # every record is one
        default: Any = ...
        if each.default is not dataclasses.MISSING:
            default = known[type(each.default).__name__]() if isinstance(each.default, records.Record) else each.default
        elif each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        least = _LEAST_ITEMS.get((record, each.name))
        hint = hints[each.name] if least is None else Annotated[hints[each.name], Field(min_length=least)]
        fields[each.name] = (hint, Field(default, description=each.metadata["description"]))
    base = _Flat if record is records.Model else _Strict
    model = typing.cast(
        "type[_Strict]",
        create_model(record.__name__, __base__=base, __doc__=record.__doc__, __module__=__name__, **fields),
    )
    model.record_type = record
    return model


_RECORDS = (  # each after those it holds
    records.Limits,
    records.Group,
    records.Defaults,
    records.Model,
    records.Heartbeat,
    records.Gateway,
    records.Restarts,
    records.Supervise,
    records.Deployment,
)
MODELS: dict[type[records.Record], type[_Strict]] = {}
for _record in _RECORDS:
    MODELS[_record] = _built(_record, {**_KINDS, **{kind.__name__: model for kind, model in MODELS.items()}})


def validated(record: type[R], value: Any, *, strict: bool | None = None) -> R:
    """A section from a mapping, with every check of a file. Raises pydantic's ValidationError, which is a ValueError.
    `strict`: False reads text as numbers, too."""
    found = MODELS[record].model_validate(value, strict=strict).record()
    assert isinstance(found, record)
    return found
