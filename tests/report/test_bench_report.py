"""The page, the Markdown and the terminal table: complete, self-contained, right also when there is little to show."""

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from llamarack.measure.knee import knee
from llamarack.measure.prediction import LimitReached
from llamarack.measure.record import ErrorKind
from llamarack.measure.result import RECORDS_NAME, read_result, write_result
from llamarack.report.bench_charts import _time, bench_charts, ecdf, pareto, throughput
from llamarack.report.bench_rows import against_plan, headlines, memory, overview, reasons
from llamarack.report.chart import byte_ticks
from llamarack.report.html import bench_html
from llamarack.report.markdown import bench_markdown
from llamarack.report.terminal import print_bench
from llamarack.report.write import write_bench_report
from tests.measure.streams import stream
from tests.report.results import bench_result, numbered, steady, with_rack

FAILED = [stream(scheduled_ms=n, finished_ms=5, error_kind=ErrorKind.IN_BAND) for n in range(5)]


class _Page(HTMLParser):
    """Collects tags and what they would load."""

    VOID = ("meta", "line", "circle", "polyline", "text", "br")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _read(page: str) -> _Page:
    parser = _Page()
    parser.feed(page)
    assert parser.open == []
    return parser


@pytest.mark.parametrize("levels", [[], [steady()], [steady(), steady()], [FAILED], [steady(), FAILED]])
def test_page_is_well_formed_and_loads_nothing_whatever_was_measured(levels) -> None:
    page = bench_html(bench_result(*levels), numbered(*levels))
    parsed = _read(page)
    assert parsed.loads == []
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    assert not re.search(r"@import|url\(|https?://(?!h:1)", page)
    assert "NaN" not in page
    assert "None" not in page
    assert "inf" not in re.sub(r"information|infer", "", page.lower())


def test_page_escapes_what_the_server_said() -> None:
    result = bench_result(steady(), notes=("<b>note</b>",))
    page = bench_html(result, numbered(steady()))
    assert "m<script>" not in page
    assert "<b>note</b>" not in page
    assert "&lt;b&gt;note&lt;/b&gt;" in page


def test_invalid_run_says_so_in_every_form_and_gives_the_reason() -> None:
    result = bench_result(FAILED)
    assert any("failures: 5 of 5" in reason for reason in reasons(result))
    console = Console(file=io.StringIO(), width=200)
    print_bench(result, console)
    for text in (bench_html(result, FAILED), bench_markdown(result), console.file.getvalue()):  # type: ignore[attr-defined]
        assert "INVALID" in text
        assert "failures: 5 of 5" in text


def test_unsupported_quantiles_and_unknown_values_are_dashes() -> None:
    (row,) = overview(bench_result(steady(40))).rows
    cells = dict(zip(overview(bench_result(steady(40))).headers, row, strict=True))
    assert cells["p99"] == "–"
    assert cells["first token p50"] == "20 ms"
    assert cells["running"] == "–"
    assert cells["tokens/s"].startswith("50.0")


def test_markdown_tables_have_as_many_cells_as_headers_and_escape_pipes() -> None:
    text = bench_markdown(bench_result(steady(), steady()))
    assert "m&lt;script>\\|" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_written_report_reads_the_records_beside_it(tmp_path: Path) -> None:
    (tmp_path / RECORDS_NAME).write_bytes(b"")
    page = write_bench_report(bench_result(steady()), tmp_path)
    assert page.read_text().startswith("<!doctype html>")
    assert (tmp_path / "report.md").exists()


def test_charts_carry_the_measured_numbers() -> None:
    result = bench_result(steady(), steady())
    (line,) = throughput(result.points).lines
    assert [x for x, _ in line.points] == [1.0, 2.0]
    assert [y for _, y in line.points] == pytest.approx([50.0, 50.0])
    (front,) = pareto(result.points).lines
    assert list(front.points[0]) == pytest.approx([50.0, 50.0])
    _, courses = bench_charts(result, numbered(steady(), steady()))
    course = [chart for chart in courses if "Rate along" in chart.title]
    assert len(course) == 2
    rates = [rate for _, rate in course[0].lines[0].points]
    assert sum(rates) / len(rates) == pytest.approx(50.0, rel=0.02)


def test_ecdf_rises_from_zero_to_one_through_every_value() -> None:
    assert ecdf([3.0, 1.0, 2.0, 2.0]) == ((1.0, 0.0), (1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0))
    assert ecdf([]) == ()
    thinned = ecdf([float(i) for i in range(100_000)])
    assert len(thinned) < 3000
    assert thinned[-1] == (99_999.0, 1.0)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [([10, 20, 39, 40], 2), ([10, 20, 40, 80], 3), ([50, 50, 50, 20], 0), ([10, None, 12, None], 2), ([10], None)],
)
def test_knee_is_the_first_level_with_nine_tenths_of_the_best(rates, expected) -> None:
    assert knee([2.0**i for i in range(len(rates))], rates) == expected


def test_open_loop_counts_first_tokens_from_the_scheduled_time() -> None:
    late = [replace(record, sent_monotonic_ns=record.scheduled_monotonic_ns + 10_000_000) for record in steady()]
    result = bench_result(late)
    open_point = replace(result.points[0], concurrency=None, rate_per_s=10.0)
    table = overview(replace(result, points=(open_point,)))
    assert dict(zip(table.headers, table.rows[0], strict=True))["first token p50"] == "20 ms"
    assert dict(zip(table.headers, overview(result).rows[0], strict=True))["first token p50"] == "10 ms"
    assert "was scheduled" in (table.note or "")


def test_terminal_table_is_whole_and_aligned_on_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)
    print_bench(bench_result(steady(), steady()), console)
    header, first, second = console.file.getvalue().splitlines()[:3]  # type: ignore[attr-defined]
    assert header.split()[0] == "load"
    assert header.endswith("verdict")
    assert len(header) == len(first) == len(second)
    assert first.endswith("valid")


def test_invalid_levels_are_hollow_and_no_knee() -> None:
    charts, _ = bench_charts(bench_result(steady(), steady(30), steady(10)), [])
    hollow = {chart.title.split(",")[0]: chart.lines[0].hollow for chart in charts[:2]}
    assert hollow == {"Output tokens per second": frozenset({2}), "First token": frozenset({2})}
    alone, _ = bench_charts(bench_result(steady(), steady(10)), [])
    assert alone[0].marks == ()


def test_pareto_points_are_named_by_their_load() -> None:
    (line,) = pareto(bench_result(steady(), steady()).points).lines
    assert line.labels == ("1", "2")


def test_rack_of_this_machine_is_shown_beside_its_plan_with_its_memory(tmp_path: Path) -> None:
    result = with_rack(bench_result(steady(), steady()))
    table = against_plan(result)
    assert table is not None
    assert table.rows == (("1 at once", "–", "–", "–", "25 ms", "20 ms", "-20%", "–", "–", "–", "36%", "1.2%"),)
    assert "2 x NVIDIA H200, with 4,800.0 GB/s and 989 fp16 TFLOP/s each" in (table.note or "")
    held = memory(result)
    assert held is not None
    assert held.rows == (("card 0 (NVIDIA H200)", "10.0 GiB", "70.0 GiB", "60.0 GiB", "50%"),)
    page, text = bench_html(result, numbered(steady(), steady())), bench_markdown(result)
    _read(page)
    for shown in (page, text):
        assert "Against the plan" in shown
        assert "70.0 GiB" in shown
    console = Console(file=io.StringIO(), width=40)
    print_bench(result, console)
    assert "-20%" in console.file.getvalue()  # type: ignore[attr-defined]
    assert against_plan(bench_result(steady())) is None
    assert memory(bench_result(steady())) is None


def test_page_opens_with_the_figures_that_answer_a_question() -> None:
    fast, slow, broken = steady(), steady(), steady(10)
    found = {each.name: each for each in headlines(bench_result(slow, fast, broken))}
    assert found["valid levels"].value == "2 of 3"
    assert found["highest rate"].value == "50.0 tokens/s"
    assert found["first token, p50"].value == "20 ms"
    assert "kept ttft:150" in found["best goodput"].detail
    none = headlines(bench_result(FAILED))
    assert [(each.name, each.value) for each in none] == [("valid levels", "0 of 1")]
    assert none[0].detail == "5 of 5 requests failed"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0"), (4.0, "4 s"), (2.5, "2.5 s"), (0.5, "500 ms"), (20.0, "20 s"), (0.01, "10 ms")]
)
def test_times_on_an_axis_are_short(seconds: float, text: str) -> None:
    assert _time(seconds) == text


def test_promise_and_plan_have_their_charts_where_there_is_one() -> None:
    result = with_rack(bench_result(steady(), steady()))
    charts = {chart.title: chart for chart in bench_charts(result, [])[0]}
    planned = {line.name: line.points for line in charts["Per-token time: plan and measured"].lines}
    assert planned == {"measured, p50": ((1.0, 0.02),), "plan": ((1.0, 0.025),)}
    finished, kept = charts["Requests per second"].lines
    assert finished.points == kept.points  # every request of these kept it
    without = replace(result, plan=None, memory=(), points=tuple(replace(p, goodput=None) for p in result.points))
    assert len(bench_charts(without, [])[0]) == 4


def test_plan_that_said_nothing_is_not_shown() -> None:
    result = with_rack(bench_result(steady()))
    assert result.plan is not None
    (planned,) = result.plan.points
    assert planned is not None
    unforeseen = replace(planned, compared=tuple(replace(each, predicted=None) for each in planned.compared))
    counted = against_plan(replace(result, plan=replace(result.plan, points=(unforeseen,))))
    assert counted is not None  # an engine that counts its own work has a share without a plan of its speed
    assert counted.rows[0][-2:] == ("36%", "1.2%")
    nothing = LimitReached(memory_bandwidth_fraction=None, arithmetic_fraction=None)
    silent = replace(unforeseen, limit=nothing)
    assert against_plan(replace(result, plan=replace(result.plan, points=(silent,)))) is None


def test_byte_axis_has_ticks_at_whole_units() -> None:
    assert byte_ticks(70 * 2**30) == [i * 16 * 2**30 for i in range(6)]
    assert byte_ticks(0)[0] == 0.0


def test_result_with_a_rack_comes_back_from_its_file(tmp_path: Path) -> None:
    result = with_rack(bench_result(steady()))
    write_result(result, tmp_path)
    assert read_result(tmp_path) == result
