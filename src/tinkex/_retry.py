"""The one retry loop.

A policy decides: it gets the error and the facts of the attempts so far, and returns the seconds to wait, or None
to give up. `retrying` is the only code that acts on such a decision. Requests, polls, samples, downloads,
telemetry and recovery differ only in their policy.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tinkex._statuses import facts_of
from tinkex.errors import APIConnectionError, APIStatusError, TinkerError

__all__ = [
    "Clock",
    "Every",
    "NotYetError",
    "RetryPolicy",
    "Tried",
    "asked_wait",
    "exponential",
    "full_jitter",
    "may_pass",
    "retrying",
    "run_blocking",
]

T = TypeVar("T")

#: Longest wait in seconds that a service may ask for; a longer one is ignored as a mistake.
MAX_RETRY_AFTER = 60.0


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, sleep, timeouts and randomness in one place, so that tests can replace them."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    timeout: Callable[[float], AbstractAsyncContextManager[Any]] = asyncio.timeout
    random: Callable[[], float] = random.random


@dataclass(frozen=True, slots=True)
class Tried:
    """The facts of a failed attempt, for the policy. Times are in seconds."""

    attempt: int  #: index of the failed attempt, from 0
    elapsed: float = 0.0  #: since the first attempt began
    took: float = 0.0  #: how long the failed attempt itself took
    chance: float = 0.0  #: a random number in [0, 1), for jitter


class NotYetError(Exception):
    """The attempt got an answer, but the result is not ready yet."""


class RetryPolicy(Protocol):
    def wait_before_retry(self, error: Exception, tried: Tried, /) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Every:
    """Ask every `seconds` until the result is ready; every other error is final."""

    seconds: float

    def wait_before_retry(self, error: Exception, _: Tried) -> float | None:
        return self.seconds if isinstance(error, NotYetError) else None


class OnWait(Protocol):
    # `Any`: the policy decides which errors are retried, and its owner knows their types.
    def __call__(self, error: Any, tried: Tried, wait: float, /) -> None: ...


class AttemptObserver(Protocol):
    """Receives every attempt; the client passes the one that emits telemetry events."""

    def started(self, clock: Clock, attempt: int, /) -> None: ...
    def failed(
        self, attempt: int, seconds: float, error: Exception, wait: float | None, /
    ) -> None: ...
    def succeeded(self, clock: Clock, attempt: int, began: float, /) -> None: ...


def exponential(repeats: int, initial: float, maximum: float) -> float:
    """`initial`, doubled `repeats` times, at most `maximum`."""
    # Sixty doublings exceed any useful maximum and do not overflow.
    return min(initial * 2.0 ** min(repeats, 60), maximum)


def full_jitter(wait: float, chance: float) -> float:
    """A random wait between zero (excluded) and `wait`, so that many clients do not ask at the same moment."""
    return wait * (1.0 - chance)


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: by its status, or because no answer came."""
    if isinstance(error, APIStatusError):
        return facts_of(error.status_code).may_pass
    return isinstance(error, APIConnectionError)


def asked_wait(error: TinkerError) -> float | None:
    """The wait that the service asks for, unless it exceeds `MAX_RETRY_AFTER`."""
    asked = error.retry_after
    return asked if asked is not None and 0 < asked <= MAX_RETRY_AFTER else None


async def retrying(
    attempt_once: Callable[[int], Awaitable[T]],
    policy: RetryPolicy,
    clock: Clock,
    on_wait: OnWait | None = None,
    deadline: float | None = None,
    events: AttemptObserver | None = None,
) -> T:
    """Call until success or until the policy gives up; then the last error is raised unchanged.

    Attempts count from 0. A wait that would end after the `deadline` is not started.
    """
    started = began = clock.monotonic()
    attempt = 0
    while True:
        if events is not None:
            events.started(clock, attempt)
        try:
            result = await attempt_once(attempt)
        except Exception as error:
            now = clock.monotonic()
            tried = Tried(attempt, now - started, now - began, clock.random())
            wait = policy.wait_before_retry(error, tried)
            if wait is not None and deadline is not None and now + wait >= deadline:
                wait = None
            if events is not None:
                events.failed(attempt, tried.took, error, wait)
            if wait is None:
                raise
            if on_wait is not None:
                on_wait(error, tried, wait)
        else:
            if events is not None:
                events.succeeded(clock, attempt, began)
            return result
        if wait > 0:
            await clock.sleep(wait)
        began = clock.monotonic()
        attempt += 1


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, on this thread and without an event loop.

    For the retry loop in blocking code: its attempts and its `clock.sleep` block instead of suspending.
    """
    try:
        work.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    work.close()
    raise RuntimeError("The coroutine waits for an event loop; it cannot run without one.")
