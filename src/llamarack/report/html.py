"""One self-contained page: no script, no font, no picture and no style from anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from markupsafe import Markup

from llamarack.measure.record import RequestRecord
from llamarack.measure.result import BenchResult, to_json
from llamarack.report.bench_charts import bench_charts
from llamarack.report.bench_rows import (
    against_plan,
    detail,
    headlines,
    memory,
    other_tools,
    overview,
    reasons,
    setting,
)
from llamarack.report.chart import svg
from llamarack.report.template import render


def bench_html(result: BenchResult, records: Sequence[RequestRecord]) -> str:
    charts, courses = bench_charts(result, records)
    started = datetime.fromtimestamp(result.environment.started_unix_s, tz=UTC)
    return render(
        "bench.html",
        result=result,
        started=started.strftime("%Y-%m-%d %H:%M:%S UTC"),
        reasons=reasons(result),
        headlines=headlines(result),
        charts=[Markup(svg(chart)) for chart in charts],
        courses=[Markup(svg(chart)) for chart in courses],
        main=overview(result),
        beside=[table for table in (against_plan(result), memory(result)) if table is not None],
        tables=[setting(result), *(detail(point) for point in result.points)],
        translations=[other_tools(point) for point in result.points],
        data=to_json(result).decode(),
    )
