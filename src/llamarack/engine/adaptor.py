"""What every engine's adaptor states, and the records it exchanges with the supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llamarack.config import Group, Model
from llamarack.engine.device_memory import DeviceTerms
from llamarack.engine.dialect import Dialect, Endpoint
from llamarack.plan.record import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """One replica as planned. `files`: a folder of this replica's own for what the engine reads at its start."""

    replica: str
    model: Model
    group: Group
    path: Path
    candidate: Candidate
    card_uuids: Sequence[str]
    files: Path
    socket: Path
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command. Nothing secret is in `argv`; `env` is the whole environment."""

    argv: Sequence[str]
    env: Mapping[str, str]
    endpoint: Endpoint
    up_mark: str | None = None  # what it prints once it answers; None: it is asked at an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why an engine died. `cause`: a stable word (`out_of_memory`, `unsupported_quantization`, `unrecognised`, ...)."""

    cause: str
    message: str
    hint: str | None


class Adaptor(Dialect, Protocol):
    def prepare(self, group: Group, *, on_cards: bool) -> None:
        """Finds what can be found wrong before a start: an engine that is missing, an option that it lacks. May take a
        minute. Raises ConfigError, HardwareError, StartFailed."""

    def launch(self, context: LaunchContext) -> Launch:
        """Writes what the engine reads into `context.files`; starts nothing. Raises UsageError for bad options."""

    def diagnose(self, exit_words: str, log_tail: Sequence[str]) -> Diagnosis:
        """The cause, from how it ended and the last lines of its log, oldest first."""

    def load_fraction(self, log_tail: Sequence[str]) -> float | None:
        """How far the load is, 0 to 1, where the log tells."""

    def device_terms(self, log_lines: Sequence[str]) -> Sequence[DeviceTerms]:
        """What a started engine's log says of its memory, in the plan's order of devices; empty where it does not."""

    def require_planned(self, candidate: Candidate, group: Group, log_lines: Sequence[str]) -> None:
        """Raises NeverReady where a started engine says that it did otherwise than planned."""

    def build(self, group: Group, *, on_cards: bool) -> str | None:
        """The version whose constants the plan takes; None: the newest that it knows. Asks, starts no engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FatalLine:
    """A log line that tells why an engine died. `pattern`: a regular expression, tried on each line."""

    pattern: str
    cause: str
    message: str
    hint: str | None = None
