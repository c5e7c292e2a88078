"""The gates file: what NEW may cost against BASE. Strict, with errors that name key and what to type.

schema_version: 1
confidence: 0.95
allow_different: [weights]          # facts that are meant to differ
gates:
  - metric: first_token_p50_s       # a regression: at most 5 % worse, and never for less than 2 ms
    worsening_max_fraction: 0.05
    floor: 0.002
    at: [1, 8]                      # concurrency or requests/s; without it, every level that both runs have
  - metric: output_tokens_per_s     # a promise of the change: at least 50 % better at 8 at once
    improvement_min_fraction: 0.5
    at: [8]
  - metric: failures_fraction       # a limit for NEW alone
    max: 0.01
  - consistency: [SAME, ROUNDING]   # the verdict of `verify`
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llamarack.errors import ConfigError
from llamarack.yaml_text import parse_yaml, read_text

SCHEMA_VERSION = 1
TEMPLATES = ("default", "one-card-against-several", "one-client-against-many", "q8-against-fp16")
MetricName = Literal[
    "first_token_p50_s",
    "first_token_p90_s",
    "per_token_p50_s",
    "per_token_p90_s",
    "end_to_end_p50_s",
    "end_to_end_p90_s",
    "output_tokens_per_s",
    "requests_per_s",
    "goodput_requests_per_s",
    "failures_fraction",
]
HIGHER_IS_BETTER = frozenset({"output_tokens_per_s", "requests_per_s", "goodput_requests_per_s"})
Fraction = Annotated[float, Field(ge=0, le=10)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Gate(_Strict):
    metric: MetricName | None = Field(None, description="what is compared or limited")
    at: list[Annotated[float, Field(gt=0)]] | None = Field(None, description="levels; default: all that both have")
    base_at: Annotated[float, Field(gt=0)] | None = Field(
        None, description="level of BASE that is compared with; default: the same"
    )
    worsening_max_fraction: Fraction | None = Field(None, description="0.05: at most 5 % worse")
    improvement_min_fraction: Fraction | None = Field(None, description="0.5: at least 50 % better")
    floor: Annotated[float, Field(ge=0)] = Field(0, description="smaller differences never count, in the metric's unit")
    max: float | None = Field(None, description="limit for NEW")
    min: float | None = Field(None, description="limit for NEW")
    consistency: list[Literal["SAME", "ROUNDING", "DRIFT"]] | None = Field(
        None, description="verdicts of verify that pass"
    )

    @model_validator(mode="after")
    def _one_rule(self) -> Gate:
        rules = ("worsening_max_fraction", "improvement_min_fraction", "max", "min", "consistency")
        given = [name for name in rules if getattr(self, name) is not None]
        if len(given) != 1:
            what = "no rule" if not given else " and ".join(given)
            raise ValueError(f"a gate has one rule, {what} given; type one of {', '.join(rules)}")
        if (self.metric is None) != (self.consistency is not None):
            raise ValueError("`metric` and `consistency` exclude each other, and one is needed")
        return self


class Gates(_Strict):
    schema_version: Literal[1] = Field(description="version of this file's format")
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = Field(0.95, description="of intervals")
    allow_different: list[str] = Field([], description="facts and settings that are meant to differ")
    gates: Annotated[list[Gate], Field(min_length=1)] = Field(description="all must pass")


def load_gates(name: str) -> Gates:
    """A file, or a template by name. Raises ConfigError."""
    if name in TEMPLATES:
        text = resources.files("llamarack.judge").joinpath("data", f"{name}.yaml").read_text(encoding="utf-8")
    else:
        text = read_text(Path(name), "gates file", hint=f"a file, or one of {', '.join(TEMPLATES)}")
    return parse_gates(text, source=name)


def parse_gates(text: str, *, source: str) -> Gates:
    value = parse_yaml(text, source).value
    if not isinstance(value, dict):
        raise ConfigError(f"`{source}` holds no mapping", hint="start with `schema_version: 1` and `gates:`")
    value.setdefault("schema_version", SCHEMA_VERSION)
    try:
        return Gates.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".") or "the file"
        hint = "known keys: " + ", ".join(Gate.model_fields) if first["type"] == "extra_forbidden" else None
        if first["type"] == "literal_error":
            hint = f"one of {first['ctx']['expected']}"
        text = str(first.get("ctx", {}).get("error") or first["msg"])
        given = "" if first["type"] in {"extra_forbidden", "value_error", "missing"} else f", `{first['input']}` given"
        raise ConfigError(f"{source}: `{key}`: {text}{given}", hint=hint) from None
