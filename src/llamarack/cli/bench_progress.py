"""Progress of a benchmark on standard error: a bar with the time left on a terminal, else one line a level."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from llamarack.measure.run import Step
from llamarack.measure.settings import Settings, num_requests


class BenchProgress:
    """`on_step` is called by the run. The bar counts measured requests, or seconds where a duration was asked for."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._duration_s = settings.duration_s
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        total = sum(settings.duration_s or num_requests(settings, level) for level in settings.levels)
        self._task = self._progress.add_task("asking the server", total=total * settings.repeats)
        self._before = 0.0
        self._level_total = 0.0
        self._level_started_s = 0.0

    def __enter__(self) -> BenchProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_step(self, step: Step) -> None:
        if step.progress is None:
            self._before += self._level_total
            self._level_total = float(self._duration_s or step.total or 0)
            self._level_started_s = time.monotonic()
            if not self._console.is_terminal:
                self._console.print(f"{step.number + 1} of {step.num_steps}: {step.level}", highlight=False)
            self._progress.update(self._task, description=f"{step.level}, warming up", completed=self._before)
            return
        elapsed_s = time.monotonic() - self._level_started_s
        done = min(elapsed_s, self._level_total) if self._duration_s is not None else step.progress.finished
        failed = f", {step.progress.failed} failed" if step.progress.failed else ""
        self._progress.update(
            self._task, description=f"{step.level}, {step.progress.phase}{failed}", completed=self._before + done
        )
