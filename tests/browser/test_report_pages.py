"""Reports as a browser shows them: nothing is fetched, nothing complains, nothing runs off the page."""

from pathlib import Path

import pytest

from llamarack.report.html import bench_html
from llamarack.report.tune import tune_html
from tests.browser.chromium import Browser
from tests.report.results import bench_result, numbered, steady, with_rack
from tests.report.test_tune_command import BEST, OVER_FILE, OVER_OWN, found

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


def _bench() -> str:
    levels = (steady(), steady(80))
    return bench_html(with_rack(bench_result(*levels, notes=("a note",))), numbered(*levels))


PAGES = {"bench": (_bench, 6), "tune": (lambda: tune_html(found(BEST, OVER_OWN, OVER_FILE)), 1)}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
async def test_report_is_drawn_without_a_complaint(
    browser: Browser, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    make, least_charts = PAGES[name]
    path = tmp_path / f"{name}.html"
    path.write_text(make(), encoding="utf-8")
    async with browser.page(path.as_uri(), width=width, dark=dark) as page:
        assert await page.evaluate("document.querySelectorAll('svg').length") >= least_charts
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)")
        # What a chart draws has a colour of the style sheet that all pages share.
        colours = await page.evaluate(
            "[...document.querySelectorAll('svg circle.c0')].map(each => getComputedStyle(each).fill)"
        )
        assert set(colours) == {"rgb(122, 168, 255)" if dark else "rgb(37, 99, 201)"}
        assert await page.evaluate("performance.getEntriesByType('resource').length") == 0
        assert page.complaints == []
        assert await page.violations() == []
