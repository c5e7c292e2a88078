"""`plan --from gpu-split.yaml`: the small file of a model, a split ratio and sizes, as a group of a deployment file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llamarack.config import Group, Limits
from llamarack.errors import ConfigError
from llamarack.yaml_text import parse_yaml, read_text

_KEYS = "model_path, main_gpu, split_ratio, context_length, batch_size, threads"


class GpuSplit(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model_path: str
    main_gpu: Annotated[int, Field(ge=0)] = 0
    split_ratio: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = Field([1.0])
    context_length: Annotated[int, Field(ge=1)] = 4096
    batch_size: Annotated[int, Field(ge=1)] = 512
    threads: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    path: Path
    group: Group
    notes: tuple[str, ...]


def read_gpu_split(path: Path, *, sequences: int) -> Translated:
    """Card i gets share i of `split_ratio`. Raises ConfigError naming the key at fault."""
    value = parse_yaml(read_text(path, "file"), str(path)).value
    try:
        asked = GpuSplit.model_validate(value)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"])) or "the file"
        raise ConfigError(f"`{path}`: `{key}`: {fault['msg'].lower()}", hint=f"its keys are {_KEYS}") from None
    model = Path(asked.model_path)
    return Translated(
        path=model if model.is_absolute() else path.parent / model, group=_group(asked, sequences), notes=_notes(asked)
    )


def _group(asked: GpuSplit, sequences: int) -> Group:
    cards = len(asked.split_ratio)
    total = sum(asked.split_ratio)
    if total <= 0:
        raise ConfigError(f"`split_ratio`: {asked.split_ratio} shares nothing out", hint="split_ratio: [0.5, 0.5]")
    if asked.main_gpu >= cards > 1:
        raise ConfigError(
            f"`main_gpu`: {asked.main_gpu} is not one of the {cards} cards of split_ratio",
            hint=f"main_gpu: 0 to {cards - 1}",
        )
    alone = cards == 1
    return Group(
        engine="llamacpp",
        gpus=[asked.main_gpu] if alone else list(range(cards)),
        split_mode="none" if alone else "layer",
        tensor_split="auto" if alone else [share / total for share in asked.split_ratio],
        limits=Limits(
            context_tokens=asked.context_length,
            sequences=sequences,
            batch_tokens=asked.batch_size,
            threads=asked.threads or "auto",
        ),
    )


def _notes(asked: GpuSplit) -> tuple[str, ...]:
    notes = []
    if abs(sum(asked.split_ratio) - 1) > 0.005:
        notes.append(f"split_ratio {asked.split_ratio} was scaled to sum to 1")
    if len(asked.split_ratio) > 1:
        notes.append("main_gpu has no effect when layers are split: llama.cpp uses it with split_mode none only")
    return tuple(notes)
