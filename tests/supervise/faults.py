"""What each fault test says of itself: the fault, the protection, how long detection and recovery took.

A test is marked `@pytest.mark.fault("what goes wrong", "what is done")` and takes the fixture `fault`; with
LLAMARACK_FAULT_TIMES naming a file, its times are appended there. `python -m tests.supervise.faults [FILE...]` runs the
marked tests (of these files) and writes docs/faults.md from the marks, their times (those of other files stay) and the
newest long run of random faults.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/faults.md"
CHAOS = ROOT / "benchmarks/results/chaos.json"
TIMES_VARIABLE = "LLAMARACK_FAULT_TIMES"
_CELL = r"(–|[\d.]+ s)"
_TIMED = re.compile(rf"\| {_CELL} \| {_CELL} \| \[(\w+)\]\(../([\w/.]+)\) \|$")
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


Times = dict[str, dict[str, float | None]]  # by test: found_s, over_s


def page(found: list[Row], times: Times, chaos: dict[str, Any] | None = None) -> str:
    lines = []
    for row in found:
        told = times.get(row.test, {})
        name = row.test.partition("::")[2]
        lines.append(
            f"| {row.fault} | {row.protection} | {_shown(told.get('found_s'))} | {_shown(told.get('over_s'))} "
            f"| [{name}](../{row.test.partition('::')[0]}) |\n"
        )
    return _HEAD + "".join(lines) + ("" if chaos is None else chaos_section(chaos))


def chaos_section(run: dict[str, Any]) -> str:
    """A run of tests/supervise/test_chaos.py, as it wrote it."""
    struck, processes = run["faults"], run["processes"]
    answered, broken, lost = run["answered"], run["broken_in_mid_stream"], run["lost_before_they_began"]
    before, after = run["descriptors"]["before"], run["descriptors"]["after"]
    kept = ", ".join(f"{owner} {before[owner]} before and {after[owner]} after" for owner in before)
    told = (
        f"{sum(struck.values()):,} faults, {run['requests']:,} requests: {answered:,} answered, {broken:,} had begun "
        f"to stream when their engine broke and ended in an error event, {lost:,} lost that had not begun.",
        "Afterwards every engine was replaced by a rolling change; of the requests that followed "
        f"{run['failed_afterwards']} failed.",
        f"Processes: {processes['before']} before and {processes['after']} after. Descriptors: {kept}. Left after the "
        f"stop: {len(run['left_after_the_stop'])} processes and sockets.",
    )
    return "\n".join(
        (
            f"\n## Random faults for {run['seconds'] / 60:.0f} minutes\n",
            _filled(
                "`make proof-chaos`: three fake engines and a real llama.cpp (SmolLM2-135M), "
                f"{run['streams']} streams at a time, one replica whole at every moment; "
                f"{run['machine']['processor']}, {run['machine']['cores_usable']} cores, seed {run['seed']}."
            ),
            "\n| fault | times |\n|---|---|",
            *(f"| {kind} | {count} |" for kind, count in struck.items()),
            "",
            *(_filled(f"- {line}") for line in told),
            "",
        )
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, width=118, subsequent_indent="  " if text.startswith("- ") else "")


def times_of(text: str) -> Times:
    """What a page tells, to the tenth of a second."""
    times: Times = {}
    for line in text.splitlines():
        if (row := _TIMED.search(line)) is not None:
            found_s, over_s = (None if cell == "–" else float(cell.split()[0]) for cell in (row[1], row[2]))
            times[f"{row[4]}::{row[3]}"] = {"found_s": found_s, "over_s": over_s}
    return times


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def main(files: list[str]) -> None:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        environment = {**os.environ, TIMES_VARIABLE: file.name}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "fault", *files], cwd=ROOT, env=environment, check=False
        )
        if done.returncode != 0:
            sys.exit("docs/faults.md stays as it is: a test failed")
        entries = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    times = times_of(PAGE.read_text(encoding="utf-8")) if files else {}
    times |= {entry["test"]: entry for entry in entries}
    chaos = json.loads(CHAOS.read_text()) if CHAOS.exists() else None
    PAGE.write_text(page(rows(), times, chaos), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
