"""Charts are well-formed SVG, with every point where its numbers say."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.report.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Line, nice_ticks, svg


def _chart(*lines: Line, **more) -> Chart:
    return Chart(title="a < b", x_label="x & y", y_label="y", lines=lines, **more)


def _circles(drawing: str) -> list[tuple[float, float]]:
    found = ElementTree.fromstring(drawing).findall("circle")
    found = [circle for circle in found if "key" not in circle.attrib["class"]]
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in found]


def test_higher_values_are_drawn_higher_and_later_ones_further_right() -> None:
    places = _circles(svg(_chart(Line(name="a", points=((1, 10), (2, 30), (4, 20))))))
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert places[1][1] < places[2][1] < places[0][1]


def test_log_axis_spaces_doublings_evenly() -> None:
    places = _circles(svg(_chart(Line(name="a", points=tuple((2.0**i, 1.0) for i in range(5))), x_is_log=True)))
    gaps = [b[0] - a[0] for a, b in pairwise(places)]
    assert max(gaps) - min(gaps) < 0.3


@given(st.lists(st.tuples(st.floats(0.001, 1e6), st.floats(0, 1e6)), min_size=1, max_size=20), st.booleans())
def test_every_point_lies_inside_the_frame(points, x_is_log: bool) -> None:
    for x, y in _circles(svg(_chart(Line(name="a", points=tuple(points)), x_is_log=x_is_log))):
        assert LEFT - 1 <= x <= WIDTH - RIGHT + 1
        assert TOP - 1 <= y <= HEIGHT - BOTTOM + 1


def test_chart_without_points_says_so() -> None:
    assert "nothing to show" in svg(_chart(Line(name="a", points=())))
    ElementTree.fromstring(svg(_chart()))


def test_single_point_of_zero_is_drawn() -> None:
    assert len(_circles(svg(_chart(Line(name="a", points=((0, 0),)))))) == 1


def test_step_line_goes_across_before_it_goes_up() -> None:
    root = ElementTree.fromstring(svg(_chart(Line(name="a", points=((0, 1), (1, 2)), style="step"))))
    line = root.find("polyline")
    assert line is not None
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    assert y0 == y1 > y2
    assert x0 < x1 == x2


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7.3), (0, 1234), (0, 1e-5), (3, 3.2), (5, 5)])
def test_ticks_cover_the_range_in_round_steps(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 8


def test_legend_of_many_lines_stays_inside_and_above_the_frame() -> None:
    lines = [Line(name=f"concurrency {i}", points=((0, 1), (1, 2))) for i in range(12)]
    root = ElementTree.fromstring(svg(_chart(*lines)))
    keys = [c for c in root.findall("circle") if "key" in c.attrib["class"]]
    assert len(keys) == 12
    assert all(LEFT <= float(key.attrib["cx"]) <= WIDTH - RIGHT for key in keys)
    highest = min(y for _, y in _circles(svg(_chart(*lines))))
    assert max(float(key.attrib["cy"]) for key in keys) < highest
    assert len({float(key.attrib["cy"]) for key in keys}) > 1


def test_mark_near_the_right_edge_has_its_text_on_its_left() -> None:
    chart = _chart(Line(name="a", points=((1, 1), (8, 2))), marks=((1.0, "first"), (8.0, "last")))
    anchors = {t.text: t.attrib.get("text-anchor") for t in ElementTree.fromstring(svg(chart)).findall("text")}
    assert anchors["first"] is None
    assert anchors["last"] == "end"
