"""A bench result as Markdown, to paste into a ticket."""

from __future__ import annotations

from llamarack.measure.result import BenchResult
from llamarack.report.bench_rows import Table, against_plan, detail, memory, other_tools, overview, reasons, setting


def bench_markdown(result: BenchResult) -> str:
    verdict = "valid" if result.valid else "INVALID"
    parts = [f"# Benchmark of {_escape(result.target.model)}: {verdict}", ""]
    parts += [f"- {_escape(reason)}" for reason in reasons(result)]
    parts += [f"- note: {_escape(note)}" for note in result.notes]
    beside = [table for table in (against_plan(result), memory(result)) if table is not None]
    tables = [overview(result), *beside, setting(result), *(detail(point) for point in result.points)]
    tables += [other_tools(point) for point in result.points[-1:]]
    return "\n".join(parts) + "\n\n" + "\n".join(table_markdown(table) for table in tables)


def table_markdown(table: Table) -> str:
    lines = [f"## {_escape(table.title)}", ""]
    lines += [_row(table.headers), _row(["---", *["---:"] * (len(table.headers) - 1)])]
    lines += [_row(row) for row in table.rows]
    if table.note is not None:
        lines += ["", table.note]
    return "\n".join(lines) + "\n"


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
