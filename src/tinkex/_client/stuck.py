"""Notices that nothing makes progress any more, and gives up on it."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal, cast

from tinkex._retry import Clock
from tinkex.errors import APIConnectionError

from .retry import RetryConfig

__all__ = ["StuckWatch"]

#: Seconds between two checks whether any request in flight makes progress.
_STUCK_CHECK: Final = 60.0


class StuckWatch:
    """Cancels all tasks in flight when none of them has made progress for `progress_timeout` seconds."""

    def __init__(self, clock: Clock, config: RetryConfig) -> None:
        self._clock = clock
        self.progress_timeout = config.progress_timeout
        self._enabled = config.enable_stuck_detection
        self._interval = min(_STUCK_CHECK, config.progress_timeout)
        self._last_progress = self._last_check = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def progressed(self) -> None:
        self._last_progress = self._clock.monotonic()

    def watching(self) -> _Watched:
        if self._enabled and self._timer is None:
            self.progressed()
            self._schedule()
        return _Watched(self._tasks)

    def _schedule(self) -> None:
        self._last_check = self._clock.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._check_progress)

    def _check_progress(self) -> None:
        self._timer = None
        if not self._tasks:
            return
        # A late check means that the process was stopped or the machine slept: that time does not count.
        now = self._clock.monotonic()
        self._last_progress += max(0.0, now - self._last_check - 2 * self._interval)
        if now - self._last_progress > self.progress_timeout:
            for task in list(self._tasks):
                _stuck.add(task)
                task.cancel()
        else:
            self._schedule()


_stuck: set[asyncio.Task[Any]] = set()


class _Watched:
    """Registers the current task; turns a cancellation by the stuck check into APIConnectionError."""

    __slots__ = ("_task", "_tasks")

    def __init__(self, tasks: set[asyncio.Task[Any]]) -> None:
        self._tasks = tasks
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())

    def __enter__(self) -> None:
        self._tasks.add(self._task)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        self._tasks.discard(self._task)
        if self._task in _stuck:
            _stuck.discard(self._task)
            if kind is asyncio.CancelledError:
                raise APIConnectionError(
                    message="Gave up: no sample of this client made progress within progress_timeout."
                )
        return False
