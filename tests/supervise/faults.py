"""What each fault test says of itself: the fault, the protection, how long detection and recovery took.

A test is marked `@pytest.mark.fault("what goes wrong", "what is done")` and takes the fixture `fault`; with
LLAMARACK_FAULT_TIMES naming a file, its times are appended there. `python -m tests.supervise.faults` runs the marked
tests and writes docs/faults.md from their marks and times.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/faults.md"
TIMES_VARIABLE = "LLAMARACK_FAULT_TIMES"
_HEAD = """# What goes wrong, and what happens then

Each row is a test with real processes that fails without the protection. Times are of one run on two shared processor
cores with the fake engine, which loads at once: **found** is from the fault to the entry in the journal, **over** to
the service as it was. Where a row waits for a setting (`stuck_request_s`, `start_deadline`), the test sets it to some
seconds. Made from the tests by `make docs-faults`.

| fault | what is done | found | over | test |
|---|---|---|---|---|
"""


class Fault:
    """The clock of one test."""

    def __init__(self) -> None:
        self._struck_s: float | None = None
        self.found_s: float | None = None
        self.over_s: float | None = None

    def strikes(self) -> None:
        self._struck_s = time.monotonic()

    def is_found(self) -> None:
        self.found_s = self._since()

    def is_over(self) -> None:
        self.over_s = self._since()

    def _since(self) -> float:
        assert self._struck_s is not None, "fault.strikes() was not called"
        return time.monotonic() - self._struck_s

    def write(self, test: str) -> None:
        path = os.environ.get(TIMES_VARIABLE)
        if path is not None:
            with open(path, "a") as file:
                file.write(json.dumps({"test": test, "found_s": self.found_s, "over_s": self.over_s}) + "\n")


@dataclass(frozen=True)
class Row:
    fault: str
    protection: str
    test: str  # tests/supervise/test_x.py::test_y


def rows() -> list[Row]:
    """The marks of all tests, read from their source, in the order of files and lines."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    fault, protection = (ast.literal_eval(argument) for argument in mark.args)
                    found.append(Row(fault, protection, f"{path.relative_to(ROOT)}::{node.name}"))
    return found


def page(found: list[Row], times: dict[str, dict[str, float | None]]) -> str:
    lines = []
    for row in found:
        told = times.get(row.test, {})
        name = row.test.partition("::")[2]
        lines.append(
            f"| {row.fault} | {row.protection} | {_seconds(told.get('found_s'))} | {_seconds(told.get('over_s'))} "
            f"| [{name}](../{row.test.partition('::')[0]}) |\n"
        )
    return _HEAD + "".join(lines)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def main() -> None:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        environment = {**os.environ, TIMES_VARIABLE: file.name}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "fault"], cwd=ROOT, env=environment, check=False
        )
        if done.returncode != 0:
            sys.exit("docs/faults.md stays as it is: a test failed")
        entries = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    PAGE.write_text(page(rows(), {entry["test"]: entry for entry in entries}), encoding="utf-8")


if __name__ == "__main__":
    main()
