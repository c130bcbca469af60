"""The store for the event loop: one thread runs its methods, those that wait together in one transaction."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Final, ParamSpec, TypeVar

from .store import Store

__all__ = ["Database"]

T = TypeVar("T")
P = ParamSpec("P")

#: Most calls that share a transaction: the first one should not wait long for the last.
_SHARED_CALLS: Final = 100


@dataclass(frozen=True)
class _Call:
    """A call for the database's thread, and the future that waits for it."""

    do: Callable[[], Any]
    can_share: bool  # a method of the store: it can be rolled back and retried
    done: Future[Any]

    def run(self) -> None:
        try:
            result = self.do()
        except BaseException as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


class Database:
    """The store for the event loop: a dedicated thread runs one call after another.

    Store methods that wait at the same time share one transaction, so that many small requests wait for the disk once.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-store")
        self._waiting: deque[_Call] = deque()
        #: Called with the duration of each call in seconds.
        self.on_call: Callable[[float], object] = lambda _: None

    async def __call__(self, method: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        started = loop.time()
        can_share = getattr(method, "__self__", None) is self.store and self.store.is_open
        call = _Call(partial(method, *args, **options), can_share, Future())
        self._waiting.append(call)
        self._thread.submit(self._work_off)
        try:
            result: T = await asyncio.wrap_future(call.done)
            return result
        finally:
            self.on_call(loop.time() - started)

    def _work_off(self) -> None:
        """Run the waiting calls in order."""
        calls: list[_Call] = []
        while self._waiting and len(calls) < _SHARED_CALLS:
            call = self._waiting.popleft()
            if call.done.set_running_or_notify_cancel():
                calls.append(call)
        for can_share, group in groupby(calls, lambda call: call.can_share):
            together = list(group)
            if not (can_share and len(together) > 1 and self._done_together(together)):
                for call in together:
                    call.run()

    def _done_together(self, calls: Sequence[_Call]) -> bool:
        """Run calls in one transaction; if one fails, roll back and return False."""
        try:
            with self.store.one_transaction():
                results = [call.do() for call in calls]
        except Exception:
            return False  # run one by one, each gets its own result or error
        for call, result in zip(calls, results, strict=True):
            call.done.set_result(result)
        return True

    def close(self) -> None:
        self._thread.shutdown()
        self.store.close()
