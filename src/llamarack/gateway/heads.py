"""Heads of requests that were parsed before. A client sends the same head again and again, but for the length of its
body: what is the same byte for byte need not be parsed, normalised and checked a second time."""

from __future__ import annotations

import re

from llamarack.gateway.exchange import Head

_MOST_KEPT = 1024
_LONGEST_BYTES = 2048
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength:[ \t]*([0-9]{1,9})[ \t]*\r\n")
_NEVER = ("transfer-encoding", "upgrade", "expect")


class Heads:
    """Of one worker, the oldest go. A head is known by its bytes before and after the digits of its Content-Length."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], Head] = {}

    def find(self, data: bytes, end: int) -> tuple[Head, int] | None:
        """The head that ends at `end`, where its blank line begins, with the length of the body behind it."""
        match = _LENGTH.search(data, 0, end + 2)
        if match is None:
            return None
        start, stop = match.span(1)
        head = self._known.get((data[:start], data[stop:end]))
        return None if head is None else (head, int(data[start:stop]))

    def learn(self, data: bytes, head: Head) -> None:
        """`data`: all of a head that the parser took, blank line and all; kept if other digits in the same place can
        mean nothing but another length."""
        end = len(data) - 4
        if end > _LONGEST_BYTES or not head.keeps_alive or any(name in head.headers for name in _NEVER):
            return
        match = _LENGTH.search(data, 0, end + 2)
        if match is None or match[1].decode() != head.headers.get("content-length"):
            return
        if data.count(b"\n") != data.count(b"\r\n"):  # lines may end otherwise, and then the head elsewhere
            return
        start, stop = match.span(1)
        if len(self._known) >= _MOST_KEPT:
            del self._known[next(iter(self._known))]
        self._known[data[:start], data[stop:end]] = head
