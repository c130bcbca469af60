"""When to try again, and how long to wait first.

The policies are pure: an error, how often it was tried and for how long, in; seconds to wait, or None to
give up, out. `retrying` is the only loop that acts on them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    BillingError,
    GoneError,
    InvalidInputError,
    TinkerError,
)
from tinkex.telemetry.bus import wants
from tinkex.telemetry.calls import attempt_failed, attempt_started, attempt_succeeded
from tinkex.telemetry.events import RetryAttemptStart, RetryAttemptStop, RetryEvent

__all__ = [
    "Clock",
    "HTTPRetryPolicy",
    "RetryConfig",
    "RetryPolicy",
    "SampleRetryPolicy",
    "retry_delay",
    "retryable_status",
    "retrying",
]

T = TypeVar("T")

#: Longest wait a service may ask for; more is taken for a mistake.
MAX_RETRY_AFTER = 60.0
#: How long a dispatch is tried again while the service does not answer.
DISPATCH_WINDOW = 300.0
MAX_WINDOW_WAIT = 30.0
BILLING_WAIT = 5.0
BLANK_400_RETRIES = 3


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, sleep, patience and chance, in one place so that tests need none of them."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    timeout: Callable[[float], AbstractAsyncContextManager[Any]] = asyncio.timeout
    random: Callable[[], float] = random.random


def retryable_status(status: int) -> bool:
    return status in {408, 409, 429} or 500 <= status < 600


def retry_delay(
    attempt: int, *, chance: float, initial: float = 0.5, maximum: float = 10.0
) -> float:
    """Exponential, capped, then shortened by up to a quarter so that clients do not march in step."""
    return min(initial * 2.0 ** min(attempt, 32), maximum) * (1 - 0.25 * chance)


class RetryPolicy(Protocol):
    def wait_before_retry(
        self, error: Exception, attempt: int, elapsed: float, chance: float
    ) -> float | None: ...


@dataclass(frozen=True, slots=True)
class HTTPRetryPolicy:
    """For one HTTP exchange.

    The first `max_retries` follow the short exponential; with a `window`, trying goes on after 1, 2, 4 … 30 s
    until that many seconds have passed.
    """

    max_retries: int = 10
    window: float = 0.0
    billing_window: float = 3600.0

    def wait_before_retry(
        self, error: Exception, attempt: int, elapsed: float, chance: float
    ) -> float | None:
        if not isinstance(error, TinkerError):
            return None
        if isinstance(error, BillingError):
            return _billing_wait(elapsed, self.billing_window)
        should = _should_retry(error)
        if should is None and _is_blank_400(error):
            return 0.0 if attempt < min(BLANK_400_RETRIES, self.max_retries) else None
        if should is False or (should is None and not is_transient(error)):
            return None
        if attempt < self.max_retries:
            return _asked_wait(error) or retry_delay(attempt, chance=chance)
        if should is None and elapsed < self.window:
            late = min(2.0 ** min(attempt - self.max_retries, 5), MAX_WINDOW_WAIT)
            return min(_asked_wait(error) or late, self.window - elapsed)
        return None


def _billing_wait(elapsed: float, window: float) -> float | None:
    """An account that cannot pay may be topped up meanwhile; the service says how long to hope for that."""
    return BILLING_WAIT if elapsed + BILLING_WAIT <= window else None


def is_transient(error: Exception) -> bool:
    if isinstance(error, APIStatusError):
        return error.status_code is not None and retryable_status(error.status_code)
    return isinstance(error, APIConnectionError)


def _is_blank_400(error: TinkerError) -> bool:
    # The service always says what was wrong with a request; a 400 without a word is a proxy's doing.
    body = error.body
    return error.status_code == 400 and not (body.strip() if isinstance(body, str) else body)


def _should_retry(error: TinkerError) -> bool | None:
    """What the service itself says about trying again."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    return {"true": True, "false": False}.get(str(headers.get("x-should-retry", "")).lower())


def _asked_wait(error: TinkerError) -> float | None:
    asked = error.retry_after
    return asked if asked is not None and 0 < asked <= MAX_RETRY_AFTER else None


@dataclass(unsafe_hash=True)  # not frozen, as scripts set the fields of the official one
class RetryConfig:
    """How sampling tries again. Delays are in seconds; `max_retries=None` means without limit."""

    max_connections: int | None = 1000
    progress_timeout: float = 7200
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = field(
        default=(asyncio.TimeoutError, APIConnectionError, GoneError)
    )
    max_retries: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("progress_timeout", "retry_delay_base"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"must be positive, not {getattr(self, name)}", field=name)
        if not self.retry_delay_max >= self.retry_delay_base:
            raise InvalidInputError(
                "must not be smaller than retry_delay_base", field="retry_delay_max"
            )
        if not 0 <= self.jitter_factor <= 1:
            raise InvalidInputError(
                f"must lie in [0, 1], not {self.jitter_factor}", field="jitter_factor"
            )
        for name in ("max_connections", "max_retries"):
            value = getattr(self, name)
            least = 1 if name == "max_connections" else 0
            if value is not None and (isinstance(value, bool) or value < least):
                raise InvalidInputError(f"must be {least} or more, not {value}", field=name)


@dataclass(frozen=True, slots=True)
class SampleRetryPolicy:
    """For one sample, from submission to result: whatever may pass is tried again."""

    config: RetryConfig
    billing_window: float = 3600.0

    def wait_before_retry(
        self, error: Exception, attempt: int, elapsed: float, chance: float
    ) -> float | None:
        config = self.config
        if isinstance(error, BillingError):  # a pause, not a retry
            return _billing_wait(elapsed, self.billing_window)
        if not config.enable_retry_logic:
            return None
        if config.max_retries is not None and attempt >= config.max_retries:
            return None
        if not (isinstance(error, config.retryable_exceptions) or is_transient(error)):
            return None
        delay = min(config.retry_delay_base * 2.0 ** min(attempt, 32), config.retry_delay_max)
        jittered = delay + delay * config.jitter_factor * (2 * chance - 1)
        return max(0.0, min(jittered, config.retry_delay_max))


class OnWait(Protocol):
    # The error is whatever the policy would try again, which its caller knows best.
    def __call__(self, error: Any, attempt: int, elapsed: float, wait: float) -> None: ...


async def retrying(
    attempt_once: Callable[[int], Awaitable[T]],
    policy: RetryPolicy,
    clock: Clock,
    on_wait: OnWait | None = None,
    deadline: float | None = None,
) -> T:
    """Call until it succeeds or the policy gives up; then the last error is raised as it came.

    Attempts are numbered from 0. A wait that would cross the `deadline` is not begun.
    """
    started = began = clock.monotonic()
    attempt = 0
    while True:
        if wants(RetryAttemptStart):
            attempt_started(clock, attempt)
        try:
            result = await attempt_once(attempt)
        except Exception as error:
            now = clock.monotonic()
            wait = policy.wait_before_retry(error, attempt, now - started, clock.random())
            if wait is not None and deadline is not None and now + wait >= deadline:
                wait = None
            if wants(RetryEvent):
                attempt_failed(attempt, now - began, error, wait)
            if wait is None:
                raise
            if on_wait is not None:
                on_wait(error, attempt, now - started, wait)
        else:
            if wants(RetryAttemptStop):
                attempt_succeeded(attempt, clock.monotonic() - began)
            return result
        await clock.sleep(wait)
        began = clock.monotonic()
        attempt += 1
