"""What one key may use: requests at once, a minute, tokens a day. Counted over all workers, kept over restarts.

A worker counts its own and reads the others' parts of the ledger. The tokens of a day lie in the rack's folder, one
file a day and worker, and are there for the bill too: `llamarack keys usage`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from llamarack.errors import Forbidden, RateLimited
from llamarack.gateway.admission import Admission
from llamarack.gateway.ledger import Ledger, Part

if TYPE_CHECKING:
    from llamarack.gateway.keys import Key

_DAY_S = 86_400


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


_NONE = Use()


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
        self._running: dict[str, int] = {}
        self._minute: dict[str, tuple[int, int]] = {}
        self._day = int(now_unix_s()) // _DAY_S
        self._use: dict[str, Use] = {}
        self._changed = False
        if folder is not None:
            # A rack that has fewer workers than before: the first counts what the others left.
            numbers = [worker, *(range(workers, 64) if worker == 0 else ())]
            for number in numbers:
                for name, use in read_day(_file(folder, self._day, number)).items():
                    self._add(name, use)
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
        with self._deciding() as others:
            self._new_day()
            minute = int(self._now()) // 60
            running = self._running.get(key.name, 0)
            in_minute = self._in_minute(key.name, minute)
            told = [part.callers.get(key.name, ()) for _, part in others]
            if key.max_parallel is not None and running + sum(t[0] for t in told if t) >= key.max_parallel:
                raise RateLimited(f"this key has {key.max_parallel} requests running, the most it may", retry_after_s=1)
            asked = in_minute + sum(t[2] for t in told if t and t[1] == minute)
            if key.requests_per_minute is not None and asked >= key.requests_per_minute:
                raise RateLimited(
                    f"this key has made {key.requests_per_minute} requests in this minute, the most it may",
                    retry_after_s=60 - self._now() % 60,
                )
            used = self._use.get(key.name, _NONE).tokens + sum(t[4] for t in told if t and t[3] == self._day)
            if key.tokens_per_day is not None and used >= key.tokens_per_day:
                raise RateLimited(
                    f"this key has used {used} tokens today (UTC), {key.tokens_per_day} are its share",
                    retry_after_s=_DAY_S - self._now() % _DAY_S,
                    should_retry=False,
                )
            self._running[key.name] = running + 1
            self._minute[key.name] = (minute, in_minute + 1)
            self._tell(key.name)

    def leave(self, key: Key, prompt_tokens: int, generated_tokens: int) -> None:
        with self._deciding():
            self._new_day()
            left = self._running[key.name] - 1
            if left:
                self._running[key.name] = left
            else:
                del self._running[key.name]
            self._add(key.name, Use(requests=1, prompt_tokens=prompt_tokens, generated_tokens=generated_tokens))
            self._changed = True
            self._tell(key.name)

    def save(self) -> None:
        """Writes the day where it changed."""
        if self._folder is None or not self._changed:
            return
        self._changed = False
        path = _file(self._folder, self._day, self._worker)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(orjson.dumps({"schema_version": 1, "keys": self._use}))
        os.replace(fresh, path)

    def _deciding(self) -> contextlib.AbstractContextManager[list[tuple[int, Part]]]:
        return _ALONE if self._ledger is None else _under(self._ledger, self._part)

    def _in_minute(self, name: str, minute: int) -> int:
        known = self._minute.get(name)
        return known[1] if known is not None and known[0] == minute else 0

    def _new_day(self) -> None:
        day = int(self._now()) // _DAY_S
        if day != self._day:
            self.save()
            self._day, self._use = day, {}
            self._minute.clear()

    def _add(self, name: str, more: Use) -> None:
        known = self._use.get(name)
        if known is None:
            known = self._use[name] = Use()
        known.add(more)

    def _tell(self, name: str) -> None:
        minute, in_minute = self._minute.get(name, (0, 0))
        tokens = self._use.get(name, _NONE).tokens
        self._part.callers[name] = (self._running.get(name, 0), minute, in_minute, self._day, tokens)

    def _tell_all(self) -> None:
        with self._deciding():
            for name in self._use:
                self._tell(name)


_ALONE: contextlib.nullcontext[list[tuple[int, Part]]] = contextlib.nullcontext([])


@contextlib.contextmanager
def _under(ledger: Ledger, part: Part) -> Iterator[list[tuple[int, Part]]]:
    with ledger.locked():
        try:
            yield ledger.others()
        finally:
            ledger.publish(part)


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
