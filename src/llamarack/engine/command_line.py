"""Options of an engine's command line in the spelling of the version that is installed. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarack.errors import ConfigError

_FLAG = re.compile(r"(?<![\w-])--([a-z0-9][a-z0-9_.-]*[a-z0-9])")
EngineArgs = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """`names`: spellings, newest first. `value` None: a switch. `needed`: a version that lacks it cannot be used."""

    names: tuple[str, ...]
    value: str | None
    needed: bool = True


def flags_of(help_text: str) -> frozenset[str]:
    """Long options that a help text names, without their dashes, in the dashed spelling."""
    return frozenset(name.replace("_", "-") for name in _FLAG.findall(help_text))


def dashed(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def render_options(options: Sequence[Option], known: frozenset[str], *, program: str, hint: str) -> list[str]:
    """Arguments in the spelling of the installed version. Raises ConfigError for a needed option it lacks."""
    arguments: list[str] = []
    for option in options:
        name = next((name for name in option.names if name in known), None)
        if name is None:
            if option.needed:
                raise ConfigError(f"{program} has no option `--{option.names[0]}`", hint=hint)
            continue
        arguments += [f"--{name}"] if option.value is None else [f"--{name}", option.value]
    return arguments


def pass_engine_args(
    given: EngineArgs, known: frozenset[str], modelled: Mapping[str, str], *, program: str
) -> list[str]:
    """engine_args as they are; `modelled`: what the deployment file sets, by option.

    Raises ConfigError for one that the file models or that this version lacks.
    """
    arguments: list[str] = []
    for key, value in given.items():
        name = dashed(key)
        owner = modelled.get(name) or modelled.get(name.removeprefix("no-"))
        if owner is not None:
            raise ConfigError(f"engine_args.{key}: the deployment file models this", hint=f"set {owner} instead")
        if name not in known and name.partition(".")[0] not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            raise ConfigError(
                f"engine_args.{key} is no option of this {program}",
                hint=f"near: {close[0]}" if close else f"engine_args takes {program}'s own names, without the dashes",
            )
        arguments += _argument(key, name, value, known)
    return arguments


def _argument(key: str, name: str, value: str | int | float | bool | None, known: frozenset[str]) -> list[str]:
    if value is None or value is True:
        return [f"--{name}"]
    if value is not False:
        return [f"--{name}", str(value)]
    if f"no-{name}" not in known:
        raise ConfigError(f"engine_args.{key}: this option cannot be switched off", hint="leave it out")
    return [f"--no-{name}"]
