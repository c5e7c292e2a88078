"""`llamarack compare BASE NEW`: may NEW replace BASE?"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from llamarack.cli.console import people
from llamarack.judge import compare as comparison
from llamarack.judge.bench_run import read_bench_run
from llamarack.judge.compare_record import RESULT_NAME, to_json, write_result
from llamarack.judge.gates import TEMPLATES, load_gates
from llamarack.judge.verify_record import read_result
from llamarack.measure.result import make_run_folder
from llamarack.report.compare import print_compare, write_compare_report

_RUN = "folder of bench -o, or several of one deployment joined by commas"


def compare(
    base: Annotated[str, typer.Argument(help=f"what is there now: {_RUN}")],
    new: Annotated[str, typer.Argument(help="what shall replace it, given likewise")],
    gates: Annotated[str, typer.Option(help=f"a gates file, or one of {', '.join(TEMPLATES)}")] = "default",
    verify: Annotated[Path | None, typer.Option(help="folder of verify -o, for gates on consistency")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="a difference that is meant; may be repeated")] = None,
    allow_unlike: Annotated[bool, typer.Option("--allow-unlike", help="compare whatever differs")] = False,
    accept_invalid: Annotated[bool, typer.Option("--accept-invalid", help="use runs that bench calls invalid")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="folder for report and JUnit")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the result record")] = False,
) -> None:
    """Hold two benchmarks against gates. Exit code 0 for GO, 6 for NO-GO, 7 for INCONCLUSIVE."""
    rules = load_gates(gates)
    ours = read_bench_run(base, accept_invalid=accept_invalid)
    theirs = read_bench_run(new, accept_invalid=accept_invalid)
    result = comparison.compare(
        ours,
        theirs,
        rules,
        gates_name=gates,
        allowed=allow or (),
        allow_unlike=allow_unlike,
        consistency=None if verify is None else read_result(verify),
        finished_unix_s=time.time(),
    )
    if output is not None:
        if not (output / RESULT_NAME).exists():  # a comparison may be made again, and takes the place of the former
            make_run_folder(output)
        write_result(result, output / RESULT_NAME)
        people.print(f"report: {write_compare_report(result, ours, theirs, output)}")
    if json:
        sys.stdout.buffer.write(to_json(result))
        sys.stdout.flush()
    else:
        print_compare(result, Console())
    raise typer.Exit(result.verdict.exit_code)
