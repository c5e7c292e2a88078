"""docs/faults.md and the tests tell the same: every row has a test, every marked test has a row."""

import json

from tests.supervise.faults import CHAOS, PAGE, Row, page, rows, times_of


def _table(text: str) -> list[tuple[str, ...]]:
    """Rows without their times."""
    cells = [
        tuple(cell.strip() for cell in line.split("|")[1:-1])
        for line in text.partition("\n## ")[0].splitlines()
        if line.startswith("| ")
    ]
    return [(row[0], row[1], row[4]) for row in cells[1:]]


def test_every_row_of_the_page_has_its_test_and_every_marked_test_its_row() -> None:
    assert _table(PAGE.read_text(encoding="utf-8")) == _table(page(rows(), {})), "run make docs-faults"
    assert len(rows()) >= 20


def test_marks_are_words_without_the_tables_own_sign() -> None:
    for row in rows():
        assert "|" not in row.fault + row.protection


def test_times_of_tests_that_were_not_run_again_stay() -> None:
    found = [Row("a", "b", "tests/x/test_y.py::test_one"), Row("c", "d", "tests/x/test_y.py::test_two")]
    times = {"tests/x/test_y.py::test_one": {"found_s": 1.5, "over_s": None}}
    kept = times_of(page(found, times))
    assert kept["tests/x/test_y.py::test_one"] == {"found_s": 1.5, "over_s": None}
    assert kept["tests/x/test_y.py::test_two"] == {"found_s": None, "over_s": None}


def test_page_tells_the_newest_long_run_of_random_faults() -> None:
    run = json.loads(CHAOS.read_text())
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(rows(), times_of(text), run), "run make docs-faults"
    assert run["lost_before_they_began"] == 0
    assert run["left_after_the_stop"] == []
