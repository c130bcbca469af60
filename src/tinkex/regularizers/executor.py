"""Runs user functions: several at a time, each with a time limit, on threads that can be abandoned.

A thread cannot be stopped from outside; the executor can only stop waiting for it. So every function runs on its own
daemon thread: one that never returns blocks neither its caller nor the end of the program.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextvars import copy_context
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from tinkex.errors import InvalidInputError

__all__ = ["Executor", "Outcome", "start"]

T = TypeVar("T")


def start(work: Callable[[], T]) -> Future[T]:
    """Run `work` on a daemon thread, in a copy of the caller's context."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # an abandoned future can then still take its result
    context = copy_context()

    def run() -> None:
        try:
            result = context.run(work)
        except BaseException as error:  # the waiting caller gets every exception
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="tinkex-loss", daemon=True).start()
    return future


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How one function ended: with a result, an error, or neither, which means a timeout."""

    seconds: float
    result: T | None = None
    error: BaseException | None = None


class _Run(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.given_up = False
        self._began: Future[float] = Future()
        self._outcome: Future[Outcome[T]] = Future()

    def __call__(self) -> None:
        began = monotonic()
        self._began.set_result(began)
        try:
            result = self._work()
        except BaseException as error:
            self._outcome.set_result(Outcome(monotonic() - began, error=error))
        else:
            self._outcome.set_result(Outcome(monotonic() - began, result))

    def outcome(self, timeout: float | None) -> Outcome[T]:
        """Wait for the result, at most `timeout` seconds after the function started."""
        began = self._began.result()
        left = None if timeout is None else max(0.0, began + timeout - monotonic())
        done, _ = wait([self._outcome], left)
        if done:
            return self._outcome.result()
        self.given_up = True
        return Outcome(monotonic() - began)


@dataclass(frozen=True)
class Executor:
    """Runs functions in parallel, at most `max_concurrency` at a time, or one after another.

    The default is one per processor and at least eight, because many functions only wait. `timeout` is the limit in
    seconds for each function; None means no limit.
    """

    parallel: bool = True
    timeout: float | None = 30.0
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidInputError(f"must be more than 0, not {self.timeout}", field="timeout")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise InvalidInputError(
                f"must be 1 or more, not {self.max_concurrency}", field="max_concurrency"
            )

    def run(self, works: Sequence[Callable[[], T]]) -> Generator[Outcome[T], None, None]:
        """The outcomes in the order of `works`. If the caller stops iterating, no further function is started.

        Without `parallel`, each function starts when its outcome is requested.
        """
        runs = [_Run(work) for work in works]
        waiting = deque(runs if self.parallel else ())
        lanes = min(len(waiting), self.max_concurrency or max(8, os.cpu_count() or 1))
        for _ in range(lanes):
            start(lambda: _work_off(waiting))
        try:
            for run in runs:
                if not self.parallel:
                    start(run)
                outcome = run.outcome(self.timeout)
                if run.given_up and waiting:  # its thread is abandoned, so a new one replaces it
                    start(lambda: _work_off(waiting))
                yield outcome
        finally:
            waiting.clear()


def _work_off(waiting: deque[_Run[T]]) -> None:
    """One worker thread: run the next function until none is left, or until this thread is abandoned."""
    given_up = False
    while not given_up:
        try:
            run = waiting.popleft()
        except IndexError:
            return
        run()
        given_up = run.given_up
