"""A bench result for people at a terminal: never wrapped or cut, whatever the width, so that it can be piped."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from llamarack.measure.result import BenchResult
from llamarack.report.bench_rows import Table, against_plan, overview, reasons

_GAP = "  "


def print_bench(result: BenchResult, console: Console) -> None:
    planned = against_plan(result)
    lines = table_lines(overview(result))
    if planned is not None:
        lines += [
            Text(),
            Text(planned.title, style="bold"),
            *table_lines(planned),
            Text(planned.note or "", style="dim"),
            Text(),
        ]
    lines += [*(Text(f"note: {note}") for note in result.notes)]
    lines += [Text(reason, style="red") for reason in reasons(result)]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def table_lines(table: Table) -> list[Text]:
    widths = [max(map(cell_len, column)) for column in zip(table.headers, *table.rows, strict=True)]
    lines = [Text(_row(table.headers, widths), style="bold")]
    for row in table.rows:
        line = Text(_row(row, widths))
        line.highlight_words(["INVALID"], "bold red")
        lines.append(line)
    return lines


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
    first, *others = cells
    return _GAP.join([first + padded[0], *(pad + cell for pad, cell in zip(padded[1:], others, strict=True))])
