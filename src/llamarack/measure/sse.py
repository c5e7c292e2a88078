"""Which server-sent events did these bytes complete, and at which socket read?

Bytes in, events out, no I/O. An event carries the stamp of the read that brought its closing blank line; a stamp is
taken by the caller before any parsing. Comments and unknown fields are dropped, as the specification says
(https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6).
"""

from __future__ import annotations

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """`data`: the joined data lines as bytes; characters split over reads are whole here."""

    read_monotonic_ns: int
    name: str
    data: bytes


class SseDecoder:
    """One per response. Lines may end in LF, CRLF or CR, and may be split anywhere, inside a character too."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data_lines: list[bytes] = []
        self._name = ""
        self._is_first_line = True
        self.num_comments = 0

    def feed(self, data: bytes, read_monotonic_ns: int) -> list[SseEvent]:
        """Events completed by this read, in order."""
        buffer = self._buffer + data if self._buffer else data
        if b"\r" in buffer:
            # A CR at the very end may be half of a CRLF: it waits for the next read.
            held = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer[: len(buffer) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *lines, self._buffer = buffer.split(b"\n")
        events = []
        for line in lines:
            event = self._line(line, read_monotonic_ns)
            if event is not None:
                events.append(event)
        return events

    @property
    def has_unfinished_event(self) -> bool:
        """At the end of a stream: bytes came that no blank line closed, so the server was cut off."""
        return bool(self._data_lines) or bool(self._buffer.strip(b"\r"))

    def _line(self, line: bytes, read_monotonic_ns: int) -> SseEvent | None:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch(read_monotonic_ns)
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data_lines.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif not field:
            self.num_comments += 1
        return None

    def _dispatch(self, read_monotonic_ns: int) -> SseEvent | None:
        name, self._name = self._name, ""
        if not self._data_lines:
            return None
        data = self._data_lines[0] if len(self._data_lines) == 1 else b"\n".join(self._data_lines)
        self._data_lines.clear()
        return SseEvent(read_monotonic_ns, name, data)
