"""Progress of long runs: rich's bars on a terminal, plain lines where the output goes elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Seconds between two lines of a task.
_INTERVAL = 10.0


def progress(console: Console) -> Progress:
    """Bars, or lines if the console is a file or a pipe, where rich would print at the end only."""
    if not (console.is_terminal or console.is_jupyter):
        return _Lines(console=console, disable=True)
    return Progress(
        SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), BarColumn(),
        MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), console=console,
    )  # fmt: skip


class _Lines(Progress):
    """A line when a task begins, now and then while it goes on, and when it is done."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._said: dict[TaskID, float] = {}  # when; infinity: that it is done

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        task = super().add_task(description, *args, **options)
        self._say(task, f"{description} ...")
        return task

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._said_again(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._said_again(task_id)

    def _said_again(self, task_id: TaskID) -> None:
        task, said = self._tasks[task_id], self._said[task_id]
        if task.finished and said < float("inf"):
            self._say(task_id, f"{task.description}: done in {task.elapsed or 0:.0f} s")
            self._said[task_id] = float("inf")
        elif time.monotonic() - said >= _INTERVAL:
            self._say(task_id, f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}")

    def _say(self, task_id: TaskID, line: str) -> None:
        print(line, file=self.console.file, flush=True)
        self._said[task_id] = time.monotonic()
