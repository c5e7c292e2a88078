"""A bench result for people at a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from llamarack.measure.result import BenchResult
from llamarack.report.bench_rows import Table, overview, reasons


def print_bench(result: BenchResult, console: Console) -> None:
    console.print(_rich(overview(result)))
    for note in result.notes:
        console.print(Text(f"note: {note}"))
    for reason in reasons(result):
        console.print(Text(f"INVALID  {reason}" if "first failure" not in reason else f"         {reason}"))


def _rich(table: Table) -> RichTable:
    rich = RichTable(box=None, pad_edge=False, header_style="bold")
    for number, header in enumerate(table.headers):
        rich.add_column(header, justify="left" if number == 0 else "right", no_wrap=True)
    for row in table.rows:
        rich.add_row(*(Text(cell, style="bold red" if cell == "INVALID" else "") for cell in row))
    return rich
