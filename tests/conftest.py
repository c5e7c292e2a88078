"""For all tests: tiers that CI installs must run there, not be skipped in silence; runs of tests share no state."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Files that take minutes begin first, so that at the end no process works on one while the others have nothing left.
LONGEST = (
    "judge/test_real_verify.py", "docs/test_rack_commands.py", "supervise/test_chaos.py", "test_operations_change.py",
    "ship/test_installer.py", "cli/test_bench_file.py", "test_real_rack.py", "engine/test_install.py",
    "supervise/test_change.py", "engine/test_install_llamacpp.py", "judge/test_commands.py", "docs/test_commands.py",
)  # fmt: skip
REQUIRED_TIERS = frozenset(os.environ.get("LLAMARACK_REQUIRE_TIERS", "").split())


@pytest.fixture(scope="session", autouse=True)
def own_machine_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests run in several processes at once (docs/decisions/008): none may wait for a model that another one loads,
    find its racks and its measurements, or take its processor. A test of the defaults takes these away again."""
    folder = tmp_path_factory.getbasetemp()
    os.environ["LLAMARACK_LOAD_LOCK"] = str(folder / "load.lock")
    os.environ["LLAMARACK_STATE_DIR"] = str(folder / "state")
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads of real engines sleep where they wait, instead of spinning


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> None:
    """A shell starts what runs in its background with SIGINT ignored, nohup with SIGHUP, and every child inherits that:
    the signals that tests send to commands would mean nothing."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ranks = {here / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        tier = next((name for name in REQUIRED_TIERS if item.get_closest_marker(name)), None)
        if tier is not None:
            report.outcome = "failed"
            report.longrepr = f"the tier `{tier}` must run here, but this test was skipped: {report.longrepr}"
    return report
