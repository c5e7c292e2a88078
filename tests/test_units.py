import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack import units


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 * 2**30), ("80 GB", 80 * 10**9), ("1.5m", 3 * 2**19), ("1000000", 1000000), ("0b", 0)],
)
def test_parse_bytes_reads_what_people_type(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1G", "1e9", "1,5 GiB", "nan"])
def test_parse_bytes_refuses_the_rest_and_names_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="24GiB"):
        units.parse_bytes(text)


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("500ms", 0.5), ("5m", 300), ("24h", 86400), ("7", 7)])
def test_parse_duration_reads_what_people_type(text: str, seconds: float) -> None:
    assert units.parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.00042, "0.42 ms"), (0.84, "840 ms"), (0.9997, "1.00 s"), (1.24, "1.24 s"), (185, "3 min 05 s")],
)
def test_format_duration(seconds: float | None, text: str) -> None:
    assert units.format_duration(seconds) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_bytes_survive_printing_within_the_printed_precision(count: int) -> None:
    assert units.parse_bytes(units.format_bytes(count)) == pytest.approx(count, rel=0.06, abs=1)
