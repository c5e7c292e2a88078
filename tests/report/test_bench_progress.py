"""The progress on a terminal: counts up, names the level, shows failures."""

import io
from pathlib import Path

from rich.console import Console

from llamarack.cli.bench_progress import BenchProgress
from llamarack.measure.crew import Progress
from llamarack.measure.point import Level
from llamarack.measure.record import Phase
from llamarack.measure.run import Step
from tests.measure.test_run import settings

LEVELS = (Level(concurrency=1), Level(concurrency=2))


def _step(number: int, finished: int | None, failed: int = 0) -> Step:
    progress = None if finished is None else Progress(phase=Phase.MEASURED, finished=finished, failed=failed)
    return Step(level=LEVELS[number], repeat=0, number=number, num_steps=2, total=24, progress=progress)


def test_bar_counts_finished_requests_over_all_levels(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with BenchProgress(settings(tmp_path, levels=LEVELS), console) as progress:
        for step in (_step(0, None), _step(0, 24), _step(1, None), _step(1, 12, failed=3)):
            progress.on_step(step)
        progress._progress.refresh()
    assert "concurrency 2, measured, 3 failed" in out.getvalue()
    assert "75 %" in out.getvalue()


def test_without_a_terminal_there_is_one_line_a_level(tmp_path: Path) -> None:
    out = io.StringIO()
    with BenchProgress(settings(tmp_path, levels=LEVELS), Console(file=out)) as progress:
        for step in (_step(0, None), _step(0, 24), _step(1, None), _step(1, 12)):
            progress.on_step(step)
    assert out.getvalue().splitlines() == ["1 of 2: concurrency 1", "2 of 2: concurrency 2"]
