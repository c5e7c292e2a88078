"""Puts the reports of a run beside its records."""

from __future__ import annotations

from pathlib import Path

from llamarack.measure.result import RECORDS_NAME, BenchResult, read_records
from llamarack.report.html import bench_html
from llamarack.report.markdown import bench_markdown


def write_bench_report(result: BenchResult, folder: Path) -> Path:
    """`report.html`, whose path is returned, and `report.md`."""
    page = folder / "report.html"
    page.write_text(bench_html(result, tuple(read_records(folder / RECORDS_NAME))), encoding="utf-8")
    (folder / "report.md").write_text(bench_markdown(result), encoding="utf-8")
    return page
