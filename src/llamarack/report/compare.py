"""A compare result for people and for CI: terminal, HTML, Markdown, JUnit."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from llamarack.judge.bench_run import BenchRun
from llamarack.judge.compare import CompareResult, Decision
from llamarack.judge.compare_record import to_json
from llamarack.judge.gates import HIGHER_IS_BETTER
from llamarack.report import compare_rows as rows
from llamarack.report.chart import Chart, Line
from llamarack.report.markdown import table_markdown
from llamarack.report.page import Page, page_html
from llamarack.report.terminal import table_lines

_STYLES = {"GO": "bold green", "INCONCLUSIVE": "bold yellow", "NO-GO": "bold red"}


def print_compare(result: CompareResult, console: Console) -> None:
    lines = [Text(rows.headline(result), style=_STYLES[result.verdict])]
    lines += [Text(reason) for reason in rows.reasons(result)]
    lines += [Text(""), *table_lines(rows.gates(result))]
    if (different := rows.differences(result)) is not None:
        lines += [Text(""), *table_lines(different)]
    lines += [Text(f"note: {note}", style="dim") for note in result.notes]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def write_compare_report(result: CompareResult, base: BenchRun, new: BenchRun, folder: Path) -> Path:
    """`report.html`, whose path is returned, `report.md` and `junit.xml`."""
    path = folder / "report.html"
    path.write_text(compare_html(result, charts(result, base, new)), encoding="utf-8")
    (folder / "report.md").write_text(compare_markdown(result), encoding="utf-8")
    (folder / "junit.xml").write_bytes(compare_junit(result))
    return path


def compare_html(result: CompareResult, drawn: tuple[Chart, ...] = ()) -> str:
    finished = datetime.fromtimestamp(result.finished_unix_s, tz=UTC)
    texts = (rows.all_reasons(result), rows.differences(result))
    return page_html(
        Page(
            title=rows.title(result),
            subtitle=f"gates: {result.gates_name} · {finished:%Y-%m-%d %H:%M:%S} UTC · "
            f"{'interleaved runs' if result.is_interleaved else 'runs one after the other'}",
            verdict=str(result.verdict),
            meaning=rows.MEANING[result.verdict],
            reasons=rows.reasons(result),
            notes=result.notes,
            numbers=[rows.gates(result)],
            texts=[table for table in texts if table is not None],
            charts=drawn,
            data=to_json(result).decode(),
        )
    )


def compare_markdown(result: CompareResult) -> str:
    parts = [f"# {rows.title(result)}: {result.verdict}", "", rows.headline(result), ""]
    parts += [f"- {reason}" for reason in rows.reasons(result)]
    parts += [f"- note: {note}" for note in result.notes]
    tables = [rows.gates(result), rows.all_reasons(result), rows.differences(result)]
    return "\n".join(parts) + "\n\n" + "\n".join(table_markdown(table) for table in tables if table is not None)


def compare_junit(result: CompareResult) -> bytes:
    """A gate is a test case: NO-GO fails, INCONCLUSIVE is skipped, so that CI shows it and does not call it passed."""
    suite = ElementTree.Element(
        "testsuite",
        name="llamarack compare",
        tests=str(len(result.gates)),
        failures=str(sum(one.decision is Decision.NO_GO for one in result.gates)),
        skipped=str(sum(one.decision is Decision.INCONCLUSIVE for one in result.gates)),
        timestamp=datetime.fromtimestamp(result.finished_unix_s, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S"),
    )
    for one in result.gates:
        case = ElementTree.SubElement(
            suite, "testcase", classname=result.gates_name, name=f"{one.gate}{rows.place(one)}"
        )
        if one.decision is Decision.NO_GO:
            ElementTree.SubElement(case, "failure", message=one.reason, type="NO-GO")
        elif one.decision is Decision.INCONCLUSIVE:
            ElementTree.SubElement(case, "skipped", message=f"INCONCLUSIVE: {one.reason}")
        else:
            ElementTree.SubElement(case, "system-out").text = one.reason
    ElementTree.indent(suite)
    written: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return written


def charts(result: CompareResult, base: BenchRun, new: BenchRun) -> tuple[Chart, ...]:
    """Each gated metric, repeat by repeat: what the interval is made of."""
    drawn: list[Chart] = []
    for one in result.gates:
        if one.level is None or one.interval is None or len(drawn) == 6:
            continue
        key = (one.level, one.metric)
        lines = tuple(
            Line(name=name, points=tuple((i + 1.0, v) for i, v in enumerate(run.samples[key]) if v is not None))
            for name, run in (("BASE", base), ("NEW", new))
            if key in run.samples
        )
        drawn.append(
            Chart(
                title=f"{one.metric} at {one.level:g}, by repeat",
                x_label="repeat",
                y_label=one.metric,
                lines=lines,
                x_from_zero=False,
                format_y="{:,g}".format if one.metric in HIGHER_IS_BETTER else "{:.3g}".format,
            )
        )
    return tuple(drawn)
