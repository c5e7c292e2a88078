"""Heads of requests that were parsed before. A client sends the same head again and again, but for the length of its
body: what is the same byte for byte need not be parsed, normalised and checked a second time."""

from __future__ import annotations

import re

from llamarack.gateway.exchange import Head

_MOST_KEPT = 1024
_LONGEST_BYTES = 2048
_MOST_DIGITS = 9
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength:[ \t]*([0-9]{1,%d})[ \t]*\r\n" % _MOST_DIGITS)
_END = b"\r\n\r\n"
_NEVER = ("transfer-encoding", "upgrade", "expect")


class Known:
    """A head that was parsed: its bytes up to the digits of its Content-Length, and from behind them to its blank line,
    which is there too."""

    __slots__ = ("_after", "_before", "head")

    def __init__(self, before: bytes, after: bytes, head: Head) -> None:
        self._before = before
        self._after = after
        self.head = head

    def begins(self, data: bytes) -> tuple[int, int] | None:
        """Where the body begins in `data`, and its length; None where `data` begins with another head."""
        if not data.startswith(self._before):
            return None
        start = len(self._before)
        stop = data.find(self._after, start, start + _MOST_DIGITS + len(self._after))
        digits = data[start:stop]
        return (stop + len(self._after), int(digits)) if stop > 0 and digits.isdigit() else None


class Heads:
    """Of one worker, the oldest go."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], Known] = {}

    def find(self, data: bytes) -> Known | None:
        """The head with which `data` begins."""
        end = data.find(_END)
        match = _LENGTH.search(data, 0, end + 2) if end > 0 else None
        if match is None:
            return None
        start, stop = match.span(1)
        return self._known.get((data[:start], data[stop : end + len(_END)]))

    def learn(self, data: bytes, head: Head) -> None:
        """`data`: all of a head that the parser took, blank line and all; kept if other digits in the same place can
        mean nothing but another length."""
        end = len(data) - len(_END)
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
        before, after = data[:start], data[stop:]
        self._known[before, after] = Known(before, after, head)
