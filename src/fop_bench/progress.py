"""What the user sees while runs go on: one display with a bar for the run and one for all runs."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

REFRESH_SECONDS = 0.2


class Reporter:
    """Told by the training loop how it goes; this one says nothing."""

    def begin(self, label: str, total_steps: int, done_steps: int) -> None:
        """A run starts, or goes on after `done_steps`."""

    def stepped(self, steps: int, images: int, loss: float | None) -> None:
        """`steps` more were taken on `images` examples; the loss is None where it was not read."""

    def evaluated(self, name: str, value: float) -> None:
        """The workload's own metric was evaluated."""

    def end(self, status: str) -> None:
        """The run is over."""


class TimeLeft(ProgressColumn):
    """The time left, named as such."""

    def render(self, task: Task) -> Text:
        seconds = task.time_remaining
        left = "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
        return Text(f"ETA {left}", style="progress.remaining")


class Display(Reporter):
    """Bars with loss, metric, images/s and time left; a second one counts runs where there are
    several.
    """

    def __init__(self, console: Console, runs: int = 1, title: str = "runs") -> None:
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=24)),
            # The bar takes what is left, and gives way first where the screen is narrow.
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
            TimeLeft(table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        self._all: TaskID | None = None
        if runs > 1:
            self._all = self._progress.add_task(title, total=runs, note=f"0/{runs} runs")
        self._runs, self._done = runs, 0
        self._run = self._progress.add_task("", total=None, note="", visible=False)
        self._total = 0
        self._reset()

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def _reset(self) -> None:
        self._steps = self._images = 0
        self._loss: float | None = None
        self._metric = ""
        self._started = self._shown = time.perf_counter()

    def begin(self, label: str, total_steps: int, done_steps: int) -> None:
        self._reset()
        self._total = total_steps
        self._progress.reset(
            self._run,
            total=total_steps,
            completed=done_steps,
            description=label,
            note="",
            visible=True,
        )

    def stepped(self, steps: int, images: int, loss: float | None) -> None:
        self._steps += steps
        self._images += images
        self._loss = self._loss if loss is None else loss
        if time.perf_counter() - self._shown >= REFRESH_SECONDS:
            self._show()

    def evaluated(self, name: str, value: float) -> None:
        self._metric = f"{name} {value:.4g}"

    def _show(self) -> None:
        self._shown = time.perf_counter()
        rate = self._images / max(self._shown - self._started, 1e-9)
        loss = "" if self._loss is None else f"loss {self._loss:.4f}"
        parts = (loss, self._metric, f"{rate:,.0f} images/s")
        self._progress.update(
            self._run, advance=self._steps, note="  ".join(part for part in parts if part)
        )
        self._steps = 0

    def end(self, status: str) -> None:
        self._show()
        self.count()

    def count(self) -> None:
        """One more run is behind us, done now or recorded before."""
        self._done += 1
        if self._all is not None:
            self._progress.update(
                self._all, completed=self._done, note=f"{self._done}/{self._runs} runs"
            )

    def say(self, message: str) -> None:
        """A line above the bars."""
        self._progress.console.print(message, style="yellow", markup=False)
