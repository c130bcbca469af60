"""Progress bars on stderr; silent where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["download_bar"]


@contextmanager
def download_bar(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar for bytes: call what it gives with those done and those in all."""
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
