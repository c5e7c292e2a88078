"""Warnings and errors of the journal as JSON to a URL, each at least tried some times; never in anybody's way.

The body is the journal's entry with the rack's name: `{"rack": ..., "kind": ..., "severity": ..., "message": ...}`. A
receiver that is down costs events, oldest first, and the next delivery tells how many.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import asdict
from typing import Any

import orjson

from llamarack.supervise.journal import Entry, Journal

QUEUE_MAX = 256
_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0
_TIMEOUT_S = 10.0
_LAST_WORDS_S = 3.0  # at the rack's end
_SENT = frozenset({"warning", "error"})
# Its own trouble is not sent: it would feed on itself.
FAILED_KIND = "webhook_failed"


class Webhook:
    """`take` may be called from the journal; `run` sends, one after the other."""

    def __init__(self, url: str, rack: str, journal: Journal, *, first_wait_s: float = _FIRST_WAIT_S) -> None:
        self._url = url
        self._rack = rack
        self._journal = journal
        self._first_wait_s = first_wait_s
        self._queue: deque[Entry] = deque()
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._dropped = 0
        self.delivered = 0

    def take(self, entry: Entry) -> None:
        if entry.severity not in _SENT or entry.kind == FAILED_KIND:
            return
        if len(self._queue) >= QUEUE_MAX:
            self._queue.popleft()
            self._dropped += 1
        self._queue.append(entry)
        self._idle.clear()
        self._filled.set()

    async def run(self) -> None:
        """Until cancelled."""
        import aiohttp  # a quarter of a second that only racks with a webhook pay

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            while True:
                await self._filled.wait()
                while self._queue:
                    dropped, self._dropped = self._dropped, 0
                    await self._send(session, self._queue.popleft(), dropped)
                self._filled.clear()
                self._idle.set()

    async def finish(self) -> None:
        """Waits a little for what is queued."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._idle.wait()
        except TimeoutError:
            pass

    async def _send(self, session: Any, entry: Entry, dropped: int) -> None:
        body = orjson.dumps({"rack": self._rack, "dropped_before": dropped, **asdict(entry)})
        wait_s, why = self._first_wait_s, ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
            try:
                async with session.post(
                    self._url, data=body, headers={"Content-Type": "application/json"}, allow_redirects=False
                ) as response:
                    if response.status < 300:
                        self.delivered += 1
                        return
                    why = f"HTTP {response.status}"
                    if response.status < 500 and response.status != 429:
                        break  # it will not like the same body better
            except (OSError, TimeoutError, ValueError) as error:
                why = str(error) or type(error).__name__
            except Exception as error:  # aiohttp's own tree; a receiver's fault must not end the rack
                why = f"{type(error).__name__}: {error}"
        self._dropped += dropped + 1
        self._journal.warn(
            FAILED_KIND,
            f"`{entry.kind}` could not be delivered to the webhook: {why}",
            hint="curl -d '{}' with the URL of supervise.webhook shows what it answers",
        )
