"""A verify result for people: terminal, one HTML page, Markdown."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME, load
from llamarack.judge.forced import forced_errors
from llamarack.judge.verify_record import to_json
from llamarack.judge.verify_result import VerifyResult
from llamarack.report import verify_rows as rows
from llamarack.report.bench_rows import Table
from llamarack.report.chart import Chart, Line
from llamarack.report.markdown import table_markdown
from llamarack.report.page import Page, page_html
from llamarack.report.terminal import table_lines

_STYLES = {"SAME": "bold green", "ROUNDING": "bold green", "INCONCLUSIVE": "bold yellow"}


def print_verify(result: VerifyResult, console: Console) -> None:
    """Never wrapped or cut, so that it can be piped."""
    lines = [Text(rows.headline(result), style=_STYLES.get(result.verdict, "bold red")), Text("")]
    for cause in result.causes:
        lines += [Text(f"{cause.code}: {cause.message}", style="red"), Text(f"  {cause.evidence}")]
        lines.append(Text(f"  hint: {cause.fix}", style="cyan"))
    lines += [Text(one.message) for one in rows.deciding(result)]
    if result.drift:
        lines += [Text(""), *table_lines(rows.drift(result))]
    if (free := rows.free_run(result)) is not None:
        lines += [Text(""), *table_lines(free)]
    lines += [Text(f"note: {note}", style="dim") for note in result.notes]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def write_verify_report(result: VerifyResult, folder: Path) -> Path:
    """`report.html` and `report.md` beside the saved runs; the page's path is returned."""
    path = folder / "report.html"
    path.write_text(verify_html(result, _charts(result, folder)), encoding="utf-8")
    (folder / "report.md").write_text(verify_markdown(result), encoding="utf-8")
    return path


def verify_html(result: VerifyResult, charts: tuple[Chart, ...] = ()) -> str:
    started = datetime.fromtimestamp(result.started_unix_s, tz=UTC)
    texts = (rows.findings(result), rows.questions(result), rows.sides(result))
    named = rows.causes(result)
    page = Page(
        title=f"{result.candidate.model} against {result.reference.model}",
        subtitle=f"Does {result.candidate.name} say what {result.reference.name} says? · {result.questions_name} · "
        f"{started:%Y-%m-%d %H:%M:%S} UTC",
        verdict=str(result.verdict),
        meaning=rows.MEANING[result.verdict],
        reasons=[cause.message for cause in result.causes] + [one.message for one in rows.deciding(result)],
        notes=result.notes,
        numbers=[table for table in (rows.drift(result), rows.free_run(result)) if table is not None and table.rows],
        texts=texts,
        charts=charts,
        data=to_json(result).decode(),
        first=() if named is None else (named,),
    )
    return page_html(page)


def verify_markdown(result: VerifyResult) -> str:
    tables: list[Table | None] = [rows.causes(result), rows.findings(result), rows.drift(result)]
    tables += [rows.free_run(result), rows.questions(result), rows.sides(result)]
    parts = [
        f"# {result.candidate.model} against {result.reference.model}: {result.verdict}",
        "",
        rows.headline(result),
    ]
    parts += ["", *(f"- note: {note}" for note in result.notes), ""]
    return "\n".join(parts) + "\n".join(table_markdown(table) for table in tables if table is not None)


def _charts(result: VerifyResult, folder: Path) -> tuple[Chart, ...]:
    """Where along an answer the two part: from the saved runs, which hold every position."""
    ours, theirs = (folder / name for name in (REFERENCE_NAME, CANDIDATE_NAME))
    if result.forced is None or not ours.exists() or not theirs.exists():
        return ()
    reference, candidate = load(ours), load(theirs)
    forced = {one.question_id: one for one in candidate.forced.get("alone", ())}
    errors = []
    for observed in reference.greedy:
        if (mate := forced.get(observed.question_id)) is not None and mate.ids == observed.ids:
            errors += forced_errors(observed, mate)
    if not any(one.kl for one in errors):
        return ()
    last = max(one.index for one in errors)
    by_place = [[one.kl for one in errors if one.index == place] for place in range(last + 1)]
    mean = tuple((float(place), sum(values) / len(values)) for place, values in enumerate(by_place) if values)
    dots = tuple((float(one.index), one.kl) for one in errors if not one.agrees)
    lines = [Line(name="mean over questions", points=mean)]
    if dots:
        lines.append(Line(name="where the best token differs", points=dots, style="dots"))
    charts = [
        Chart(
            title="Divergence along the answers", x_label="token of the answer", y_label="KL, nats", lines=tuple(lines)
        )
    ]
    ordered = sorted(one.logprob_error for one in errors if one.logprob_error is not None)
    if ordered and ordered[-1] > 0:
        steps = tuple((value, (i + 1) / len(ordered)) for i, value in enumerate(ordered))
        charts.append(
            Chart(
                title="Log-probability error of the reference's tokens",
                x_label="error, nats",
                y_label="share of positions within",
                lines=(Line(name="positions", points=steps, style="step"),),
            )
        )
    return tuple(charts)
