"""Progress on stderr: bars on a terminal, a few lines of text in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["download_bar", "step_bar"]


@contextmanager
def download_bar(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar for bytes, only on a terminal: yields a function that takes the bytes done and in total."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title.rpartition("/")[2], total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def step_bar(steps: int, done: int) -> Iterator[Callable[[int, float | None], None]]:
    """Progress of training: yields a function that takes the number of a step and its held-out loss, or None.

    A terminal shows every step. A log gets a line at the first step, at every tenth of the run, and after evaluations.
    """
    import tinkex

    with tinkex.progress(steps, done=done) as shown:

        def show(step: int, held_out: float | None) -> None:
            if held_out is not None:
                shown.note = f"held out {held_out:.3f}"
            tenth = step * 10 // steps > (step - 1) * 10 // steps
            if step == 1 or tenth or held_out is not None:
                shown.write()

        yield show
