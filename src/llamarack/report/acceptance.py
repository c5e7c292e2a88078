"""An acceptance run for people and for CI: terminal, HTML, Markdown, JUnit."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from llamarack.judge.acceptance import AcceptanceResult, Outcome, Step, to_json
from llamarack.judge.compare import Decision
from llamarack.report.bench_rows import UNKNOWN, Table
from llamarack.report.markdown import table_markdown
from llamarack.report.page import Page, page_html
from llamarack.report.verify_rows import fact_rows
from llamarack.units import format_duration

_STYLES = {"GO": "bold green", "INCONCLUSIVE": "bold yellow", "NO-GO": "bold red"}
_NO_BREAK = "\u00a0"
_MEANING = {
    Decision.GO: "every step passed",
    Decision.NO_GO: "a step failed",
    Decision.INCONCLUSIVE: "no step failed, but not every one could be done or decided",
}


def headline(result: AcceptanceResult) -> str:
    return f"{result.verdict}: {_MEANING[result.verdict]}"


def steps_table(result: AcceptanceResult) -> Table:
    rows = tuple((s.name, str(s.outcome), _took(s).replace(" ", _NO_BREAK), s.summary) for s in result.steps)
    return Table(title="Steps", headers=("step", "outcome", "took", "what came out"), rows=rows)


def _took(step: Step) -> str:
    return UNKNOWN if step.outcome is Outcome.SKIPPED else format_duration(step.seconds)


def print_acceptance(result: AcceptanceResult, console: Console) -> None:
    took = format_duration(result.finished_unix_s - result.started_unix_s)
    lines = [Text(f"{headline(result)} ({took})", style=_STYLES[result.verdict]), Text("")]
    times = [_took(step) for step in result.steps]
    width = max(map(len, times), default=0)
    for step, time in zip(result.steps, times, strict=True):
        style = {"PASSED": "green", "FAILED": "red"}.get(step.outcome, "yellow")
        line = Text(f"{step.name:<8}")
        line.append(f"{step.outcome:<13}", style=style)
        line.append(f"{time:>{width}}  {step.summary}")
        lines.append(line)
        if step.outcome is not Outcome.PASSED:
            lines += [Text(f"{'':{8 + 13 + width + 2}}{detail}") for detail in step.details]
    lines += [Text(note, style="yellow") for note in notes(result)]
    for each in lines:
        console.print(each, soft_wrap=True, highlight=False)


def notes(result: AcceptanceResult) -> list[str]:
    if not result.changed_since:
        return []
    return [f"settings changed since the last valid {' and '.join(result.changed_since)}"]


def write_acceptance_report(result: AcceptanceResult, folder: Path) -> Path:
    """`report.html`, whose path is returned, `report.md` and `junit.xml`."""
    path = folder / "report.html"
    path.write_text(acceptance_html(result), encoding="utf-8")
    (folder / "report.md").write_text(acceptance_markdown(result), encoding="utf-8")
    (folder / "junit.xml").write_bytes(acceptance_junit(result))
    return path


def acceptance_html(result: AcceptanceResult) -> str:
    started = datetime.fromtimestamp(result.started_unix_s, tz=UTC)
    took = format_duration(result.finished_unix_s - result.started_unix_s)
    deciding = [s for s in result.steps if s.outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE)]
    return page_html(
        Page(
            title=f"Acceptance of {result.model}",
            subtitle=f"{result.file} · {started:%Y-%m-%d %H:%M:%S} UTC · took {took}",
            verdict=str(result.verdict),
            meaning=_MEANING[result.verdict],
            reasons=[f"{step.name}: {step.summary}" for step in deciding],
            notes=notes(result),
            numbers=[],
            texts=[steps_table(result), *(_details(step) for step in result.steps if step.details), _facts(result)],
            charts=(),
            data=to_json(result).decode(),
            links=[(f"{step.name} report", step.report) for step in result.steps if step.report is not None],
        )
    )


def acceptance_markdown(result: AcceptanceResult) -> str:
    tables = [steps_table(result), *(_details(step) for step in result.steps if step.details), _facts(result)]
    head = [f"# Acceptance of {result.model}: {result.verdict}", "", headline(result), ""]
    head += [f"- note: {note}" for note in notes(result)]
    return "\n".join(head) + "\n" + "\n".join(table_markdown(table) for table in tables)


def _details(step: Step) -> Table:
    return Table(title=step.name, headers=("seen",), rows=tuple((detail,) for detail in step.details))


def _facts(result: AcceptanceResult) -> Table:
    return Table(title="What was accepted", headers=("what", "value"), rows=fact_rows(result.facts))


def acceptance_junit(result: AcceptanceResult) -> bytes:
    outcomes = [step.outcome for step in result.steps]
    suite = ElementTree.Element(
        "testsuite",
        name="llamarack acceptance",
        tests=str(len(outcomes)),
        failures=str(outcomes.count(Outcome.FAILED)),
        skipped=str(outcomes.count(Outcome.SKIPPED) + outcomes.count(Outcome.INCONCLUSIVE)),
        time=f"{result.finished_unix_s - result.started_unix_s:.3f}",
    )
    for step in result.steps:
        case = ElementTree.SubElement(
            suite, "testcase", classname=result.model, name=step.name, time=f"{step.seconds:.3f}"
        )
        if step.outcome is Outcome.FAILED:
            failure = ElementTree.SubElement(case, "failure", message=step.summary, type="FAILED")
            failure.text = "\n".join(step.details)
        elif step.outcome is not Outcome.PASSED:
            ElementTree.SubElement(case, "skipped", message=f"{step.outcome}: {step.summary}")
    ElementTree.indent(suite)
    written: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return written
