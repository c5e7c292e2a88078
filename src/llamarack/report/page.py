"""One self-contained page for a verdict: no script, no font, no picture and no style from anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from llamarack.report.bench_rows import Table
from llamarack.report.chart import Chart, svg
from llamarack.report.template import render

_TONES = {
    **dict.fromkeys(("SAME", "ROUNDING", "GO", "PASSED", "BETTER", "valid"), "good"),
    **dict.fromkeys(("DRIFT", "BROKEN", "NO-GO", "FAILED", "INVALID"), "bad"),
    **dict.fromkeys(("INCONCLUSIVE", "SKIPPED"), "warn"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """`numbers`: tables aligned right; `texts`: tables whose cells wrap. `data`: the record, as JSON. `links`: name and
    relative address of the pages beside this one. `first`: texts that stand before the numbers.
    """

    title: str
    subtitle: str
    verdict: str
    meaning: str
    reasons: Sequence[str]
    notes: Sequence[str]
    numbers: Sequence[Table]
    texts: Sequence[Table]
    charts: Sequence[Chart]
    data: str
    links: Sequence[tuple[str, str]] = ()
    first: Sequence[Table] = ()


def page_html(page: Page) -> str:
    return render(
        "page.html",
        title=page.title,
        subtitle=page.subtitle,
        verdict=page.verdict,
        meaning=page.meaning,
        reasons=page.reasons,
        notes=page.notes,
        numbers=page.numbers,
        texts=page.texts,
        charts=[Markup(svg(chart)) for chart in page.charts],
        data=page.data,
        links=page.links,
        first=page.first,
        tones=_TONES,
        tone=_TONES.get(page.verdict, "warn"),
    )
