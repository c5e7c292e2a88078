"""For all tests: tiers that CI installs must run there, not be skipped in silence."""

import os
from collections.abc import Generator
from typing import Any

import pytest

REQUIRED_TIERS = frozenset(os.environ.get("LLAMARACK_REQUIRE_TIERS", "").split())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        tier = next((name for name in REQUIRED_TIERS if item.get_closest_marker(name)), None)
        if tier is not None:
            report.outcome = "failed"
            report.longrepr = f"the tier `{tier}` must run here, but this test was skipped: {report.longrepr}"
    return report
