"""A record survives the file it is kept in."""

import pytest

from llamarack.measure.record import ChunkKind, ErrorKind, from_json_line, to_json_line
from tests.measure.streams import stream


def test_record_read_back_is_the_record_written() -> None:
    record = stream((1, 1, ChunkKind.REASONING), (2, None), error_kind=ErrorKind.TIMEOUT, output_tokens=3)
    line = to_json_line(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert from_json_line(line) == record


def test_line_cut_off_by_a_kill_is_refused() -> None:
    with pytest.raises(ValueError):
        from_json_line(to_json_line(stream((1, 1)))[:-20])
