"""What one key may use: requests at once, a minute, tokens a day. Counted over all workers, kept over restarts.

A worker counts its own and reads the others' parts of the ledger. The tokens of a day lie in the rack's folder, one
file a day and worker, and are there for the bill too: `llamarack keys usage`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from llamarack.errors import Forbidden, RateLimited
from llamarack.gateway.admission import Admission
from llamarack.gateway.ledger import Ledger, Part

if TYPE_CHECKING:
    from llamarack.gateway.keys import Key

_DAY_S = 86_400
Told = tuple[int, int, int, int, int]  # of one key by one worker: see `ledger.Part.callers`


@dataclass(slots=True)
class Use:
    """Of one key on one day."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    def add(self, more: Use) -> None:
        self.requests += more.requests
        self.prompt_tokens += more.prompt_tokens
        self.generated_tokens += more.generated_tokens


@dataclass(slots=True)
class _Caller:
    """One key at this worker. `in_minute`: requests of that minute; `use`: of the day."""

    running: int = 0
    minute: int = 0
    in_minute: int = 0
    use: Use = field(default_factory=Use)


class Quotas:
    """`folder`: where the days are kept; None: not kept. `now_unix_s`: the clock."""

    def __init__(
        self,
        admission: Admission,
        now_unix_s: Callable[[], float],
        *,
        ledger: Ledger | None = None,
        folder: Path | None = None,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self._part = admission.part
        self._now = now_unix_s
        self._ledger = ledger
        self._folder = folder
        self._worker = worker
        self._callers: dict[str, _Caller] = {}
        self._day = int(now_unix_s()) // _DAY_S
        self._changed = False
        if folder is not None:
            # A rack that has fewer workers than before: the first counts what the others left.
            numbers = [worker, *(range(workers, 64) if worker == 0 else ())]
            for number in numbers:
                for name, use in read_day(_file(folder, self._day, number)).items():
                    self._caller(name).use.add(use)
            for number in numbers[1:]:
                with contextlib.suppress(FileNotFoundError):
                    _file(folder, self._day, number).unlink()
                    self._changed = True
            self._tell_all()
            self.save()

    def require_model(self, key: Key, model: str) -> None:
        if key.models is not None and model not in key.models:
            allowed = ", ".join(f"`{name}`" for name in key.models) or "none"
            raise Forbidden(f"this key may not use `{model}`; it may use: {allowed}", param="model")

    def enter(self, key: Key) -> None:
        """One more request of this key, to be left with `leave`. Raises RateLimited."""
        if self._ledger is None:
            self._enter(key, ())
            return
        with self._ledger.locked():
            try:
                self._enter(key, self._ledger.others())
            finally:
                self._tell(key.name)
                self._ledger.publish(self._part)

    def leave(self, key: Key, prompt_tokens: int, generated_tokens: int) -> None:
        if self._ledger is None:
            self._leave(key, prompt_tokens, generated_tokens)
            return
        with self._ledger.locked():
            self._leave(key, prompt_tokens, generated_tokens)
            self._tell(key.name)
            self._ledger.publish(self._part)

    def _enter(self, key: Key, others: Sequence[tuple[int, Part]]) -> None:
        now = self._now()
        self._see_day(now)
        caller = self._caller(key.name)
        minute = int(now) // 60
        if caller.minute != minute:
            caller.minute, caller.in_minute = minute, 0
        if key.max_parallel is not None or key.requests_per_minute is not None or key.tokens_per_day is not None:
            told = [part.callers[key.name] for _, part in others if key.name in part.callers]
            self._require(key, caller, told, now)
        caller.running += 1
        caller.in_minute += 1

    def _require(self, key: Key, caller: _Caller, told: Sequence[Told], now: float) -> None:
        running = caller.running + sum(each[0] for each in told)
        if key.max_parallel is not None and running >= key.max_parallel:
            raise RateLimited(f"this key has {key.max_parallel} requests running, the most it may", retry_after_s=1)
        asked = caller.in_minute + sum(each[2] for each in told if each[1] == caller.minute)
        if key.requests_per_minute is not None and asked >= key.requests_per_minute:
            raise RateLimited(
                f"this key has made {key.requests_per_minute} requests in this minute, the most it may",
                retry_after_s=60 - now % 60,
            )
        used = caller.use.tokens + sum(each[4] for each in told if each[3] == self._day)
        if key.tokens_per_day is not None and used >= key.tokens_per_day:
            raise RateLimited(
                f"this key has used {used} tokens today (UTC), {key.tokens_per_day} are its share",
                retry_after_s=_DAY_S - now % _DAY_S,
                should_retry=False,
            )

    def _leave(self, key: Key, prompt_tokens: int, generated_tokens: int) -> None:
        self._see_day(self._now())
        caller = self._callers[key.name]
        caller.running -= 1
        use = caller.use
        use.requests += 1
        use.prompt_tokens += prompt_tokens
        use.generated_tokens += generated_tokens
        self._changed = True

    def save(self) -> None:
        """Writes the day where it changed."""
        if self._folder is None or not self._changed:
            return
        self._changed = False
        path = _file(self._folder, self._day, self._worker)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        used = {name: caller.use for name, caller in self._callers.items() if caller.use.requests}
        fresh.write_bytes(orjson.dumps({"schema_version": 1, "keys": used}))
        os.replace(fresh, path)

    def _caller(self, name: str) -> _Caller:
        known = self._callers.get(name)
        if known is None:
            known = self._callers[name] = _Caller()
        return known

    def _see_day(self, now: float) -> None:
        day = int(now) // _DAY_S
        if day == self._day:
            return
        self.save()
        self._day = day
        self._callers = {name: caller for name, caller in self._callers.items() if caller.running}
        for caller in self._callers.values():
            caller.use, caller.in_minute = Use(), 0

    def _tell(self, name: str) -> None:
        caller = self._caller(name)
        told = (caller.running, caller.minute, caller.in_minute, self._day, caller.use.tokens)
        self._part.callers[name] = told

    def _tell_all(self) -> None:
        for name in self._callers:
            self._tell(name)
        if self._ledger is not None:
            with self._ledger.locked():
                self._ledger.publish(self._part)


def _file(folder: Path, day: int, worker: int) -> Path:
    return folder / "usage" / f"{datetime.date.fromordinal(day + 719_163).isoformat()}.{worker}.json"


def read_day(path: Path) -> dict[str, Use]:
    """Empty for one that is not there or not to be read."""
    try:
        value = orjson.loads(path.read_bytes())
        return {
            str(name): Use(**{key: int(count) for key, count in use.items()}) for name, use in value["keys"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def read_usage(folder: Path) -> dict[str, dict[str, Use]]:
    """By day (`2026-11-30`, UTC) and key, over all workers."""
    days: dict[str, dict[str, Use]] = {}
    for path in sorted((folder / "usage").glob("*.json")):
        day = days.setdefault(path.name.partition(".")[0], {})
        for name, use in read_day(path).items():
            day.setdefault(name, Use()).add(use)
    return days
