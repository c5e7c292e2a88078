"""docs/faults.md and the tests tell the same: every row has a test, every marked test has a row."""

from tests.supervise.faults import PAGE, page, rows


def _table(text: str) -> list[tuple[str, ...]]:
    """Rows without their times."""
    cells = [
        tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in text.splitlines() if line.startswith("| ")
    ]
    return [(row[0], row[1], row[4]) for row in cells[1:]]


def test_every_row_of_the_page_has_its_test_and_every_marked_test_its_row() -> None:
    assert _table(PAGE.read_text(encoding="utf-8")) == _table(page(rows(), {})), "run make docs-faults"
    assert len(rows()) >= 20


def test_marks_are_words_without_the_tables_own_sign() -> None:
    for row in rows():
        assert "|" not in row.fault + row.protection
