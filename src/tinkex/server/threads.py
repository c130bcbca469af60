"""Threads that share fairly: those in which each key has one turn at a time, and a thread that waits for nothing.

asyncio's own threads are one line for everybody. One key that asks for a hundred plots would stand in front of all other
keys, and of the restart of an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

__all__ = ["InTurn", "KeyThreads", "in_new_thread"]

P = ParamSpec("P")
T = TypeVar("T")


class InTurn(Protocol):
    """Runs work in a thread, in the turn of the key that asked for it."""

    def __call__(self, work: Callable[..., T], /, *arguments: Any) -> Awaitable[T]: ...


class KeyThreads:
    """Threads in which a key's pieces of work run one after another, so that they delay each other, not other keys."""

    def __init__(self, count: int, name: str) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def __call__(self, owner: str, work: Callable[..., T], /, *arguments: Any) -> T:
        """Run `work` when the earlier work of this key is done."""
        turn = self._turns.setdefault(owner, asyncio.Lock())
        await turn.acquire()
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except BaseException:
            turn.release()
            raise
        # Not when the caller stops waiting: a thread cannot be stopped, and a key has one at a time.
        running.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(running)

    def of(self, owner: str) -> InTurn:
        """These threads, for the work of one key."""
        return partial(self, owner)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


async def in_new_thread(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run `work` in a thread that starts now, whatever other threads are busy with."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-now")
    try:
        call = partial(work, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(thread, call)
    finally:
        thread.shutdown(wait=False)
