"""Everything one side said, as saved by `verify -o` and read back as a reference or candidate of a later run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from llamarack.errors import UsageError
from llamarack.judge.collect import Probes
from llamarack.judge.facts import Facts
from llamarack.judge.observation import Observation, Spoken

SCHEMA_VERSION = 1
REFERENCE_NAME, CANDIDATE_NAME = "reference.json", "candidate.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """`name`: as the user gave it."""

    name: str
    url: str | None
    model: str
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """`greedy`: its own answers. `passes`: forced on its own tokens: `again`, `loaded`, `restarted`. `forced`: on the
    tokens of the reference it was compared with: `alone`, `loaded`. `spoken`: where the endpoint gives text alone.
    """

    schema_version: int = SCHEMA_VERSION
    side: Side
    created_unix_s: float
    questions: str
    output_tokens: int
    top: int
    method: str
    greedy: tuple[Observation, ...] = ()
    passes: Mapping[str, tuple[Observation, ...]] = field(default_factory=dict)
    forced: Mapping[str, tuple[Observation, ...]] = field(default_factory=dict)
    spoken: Mapping[str, tuple[Spoken, ...]] = field(default_factory=dict)
    probes: Probes | None = None

    @property
    def is_text_only(self) -> bool:
        return not self.greedy


def save(collection: Collection, path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(orjson.dumps(collection, default=tuple, option=orjson.OPT_APPEND_NEWLINE))
    partial.replace(path)


def load(path: Path, *, prefer: str = CANDIDATE_NAME) -> Collection:
    """A file that `verify -o` wrote, or its folder; of a folder with both sides the one to `prefer`: as a reference its
    reference, which has the noise, as a candidate what was judged last. Raises UsageError.
    """
    if path.is_dir():
        names = sorted((CANDIDATE_NAME, REFERENCE_NAME), key=lambda name: name != prefer)
        found = [path / name for name in names if (path / name).exists()]
        if not found:
            raise UsageError(f"`{path}` holds no saved run", hint="llamarack verify ... -o DIR writes one")
        path = found[0]
    try:
        value = orjson.loads(path.read_bytes())
        if isinstance(value, dict) and value.get("schema_version") not in (None, SCHEMA_VERSION):
            raise UsageError(
                f"`{path}` has schema_version {value['schema_version']}, this version reads {SCHEMA_VERSION}",
                hint="collect it again with this version",
            )
        return TypeAdapter(Collection).validate_python(value)
    except OSError as error:
        raise UsageError(f"`{path}`: {error.strerror}", hint="a file that llamarack verify -o wrote") from error
    except (orjson.JSONDecodeError, ValidationError) as error:
        where = ""
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            where = f": {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UsageError(f"`{path}` is no saved run of verify{where}", hint="llamarack verify ... -o DIR") from error
