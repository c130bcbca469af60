"""Threads for work on files, so that neither the event loop nor the database waits for a disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

__all__ = ["FileThreads"]

P = ParamSpec("P")
T = TypeVar("T")

#: Several threads, because a large copy keeps one of them busy for long.
_THREADS: Final = 4


class FileThreads:
    """Copies, removes, reads and syncs files."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tinkex-files")

    async def __call__(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **options))

    async def remove(self, directory: Path) -> None:
        """Remove a directory, if it exists."""
        await self(shutil.rmtree, directory, ignore_errors=True)

    @asynccontextmanager
    async def within(self, context: AbstractContextManager[T]) -> AsyncIterator[T]:
        """Enter and leave a context manager in these threads."""
        value = await self(context.__enter__)
        try:
            yield value
        except BaseException as error:
            await self(context.__exit__, type(error), error, error.__traceback__)
            raise
        await self(context.__exit__, None, None, None)

    def close(self) -> None:
        self._threads.shutdown()
