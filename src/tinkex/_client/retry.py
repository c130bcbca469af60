"""Retry policies for requests and samples, and `RetryConfig`. The retry loop is in `tinkex._retry`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tinkex._retry import Tried, asked_wait, exponential, may_pass
from tinkex._statuses import facts_of
from tinkex.errors import (
    APIConnectionError,
    BillingError,
    GoneError,
    InvalidInputError,
    TinkerError,
)

__all__ = [
    "ArchivePolicy",
    "HTTPRetryPolicy",
    "RetryConfig",
    "SampleRetryPolicy",
    "ThrottlePolicy",
    "retry_delay",
    "retryable_status",
]

#: Longest wait in seconds between retries within `window`.
MAX_WINDOW_WAIT = 30.0
BILLING_WAIT = 5.0
BLANK_400_RETRIES = 3


def retryable_status(status: int) -> bool:
    return facts_of(status).may_pass


def retry_delay(
    attempt: int, *, chance: float, initial: float = 0.5, maximum: float = 10.0
) -> float:
    """Exponential delay with a cap, shortened by up to 25 % so that clients do not retry in step."""
    return exponential(attempt, initial, maximum) * (1 - 0.25 * chance)


@dataclass(frozen=True, slots=True)
class HTTPRetryPolicy:
    """Policy for one request.

    The first `max_retries` retries wait `initial` seconds, doubling to `maximum`. With a `window`, further retries wait
    1, 2, 4 … 30 s until `window` seconds have passed since the first attempt.
    """

    max_retries: int = 10
    window: float = 0.0
    billing_window: float = 3600.0
    initial: float = 0.5
    maximum: float = 10.0

    def wait_before_retry(self, error: Exception, tried: Tried) -> float | None:
        if not isinstance(error, TinkerError):
            return None
        if isinstance(error, BillingError):
            return billing_wait(tried.elapsed, self.billing_window)
        attempt, elapsed = tried.attempt, tried.elapsed
        should = _should_retry(error)
        if should is None and _is_blank_400(error):
            return 0.0 if attempt < min(BLANK_400_RETRIES, self.max_retries) else None
        if should is None and _is_lasting_conflict(error):
            return None
        if should is False or (should is None and not may_pass(error)):
            return None
        if attempt < self.max_retries:
            return asked_wait(error) or retry_delay(
                attempt, chance=tried.chance, initial=self.initial, maximum=self.maximum
            )
        if should is None and elapsed < self.window:
            late = exponential(attempt - self.max_retries, 1.0, MAX_WINDOW_WAIT)
            return min(asked_wait(error) or late, self.window - elapsed)
        return None

    def limit(self, error: TinkerError) -> str:
        """Text for the log: when the loop gives up on `error`."""
        window = self.billing_window if isinstance(error, BillingError) else self.window
        if window:
            return f"giving up {window:.0f} s after the first"
        return f"giving up after try {self.max_retries + 1}"


#: The service builds an archive on the first request for it and answers 503 until it is ready.
ARCHIVE_WAIT = 30.0
ARCHIVE_ATTEMPTS = 6


class ArchivePolicy(HTTPRetryPolicy):
    """Policy for requesting the URL of a checkpoint archive, which the service may still be building."""

    def wait_before_retry(self, error: Exception, tried: Tried) -> float | None:
        if isinstance(error, TinkerError) and error.status_code == 503:
            return ARCHIVE_WAIT if tried.attempt < ARCHIVE_ATTEMPTS - 1 else None
        return super().wait_before_retry(error, tried)

    def limit(self, error: TinkerError) -> str:
        if error.status_code == 503:
            return f"giving up after try {ARCHIVE_ATTEMPTS}: the archive is being built"
        return super().limit(error)


def billing_wait(elapsed: float, window: float) -> float | None:
    """Wait after a 402: the user may top up the account. The service sets the window in which to keep asking."""
    return BILLING_WAIT if elapsed + BILLING_WAIT <= window else None


def _is_blank_400(error: TinkerError) -> bool:
    # The service always explains a 400; one with an empty body comes from a proxy and may pass.
    body = error.body
    return error.status_code == 400 and not (body.strip() if isinstance(body, str) else body)


def _is_lasting_conflict(error: TinkerError) -> bool:
    # Most conflicts are temporary. A name or number already used by another request stays used.
    return error.status_code == 409 and bool(_TAKEN.search(error.message))


_TAKEN: Final = re.compile(r"\b(already|duplicate|reused|taken)\b", re.IGNORECASE)


def _should_retry(error: TinkerError) -> bool | None:
    """The value of the header `x-should-retry`, or None without it."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    return {"true": True, "false": False}.get(str(headers.get("x-should-retry", "")).lower())


@dataclass(unsafe_hash=True)  # not frozen: scripts for the official SDK assign its fields
class RetryConfig:
    """How samples are retried. Delays are in seconds; `max_retries=None` means no limit."""

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
        for name, (fits, wanted) in _FITS.items():
            value = getattr(self, name)
            if not fits(value):
                raise InvalidInputError(f"must be {wanted}, not {value!r:.80}", field=name)
        if self.retry_delay_max < self.retry_delay_base:
            raise InvalidInputError(
                "must not be smaller than retry_delay_base", field="retry_delay_max"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count_or_none(value: Any, least: int) -> bool:
    return value is None or (_is_number(value) and isinstance(value, int) and value >= least)


#: For each field of `RetryConfig`: its check, and the words for the error message.
_FITS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "progress_timeout": (_is_positive, "a positive number of seconds"),
    "retry_delay_base": (_is_positive, "a positive number of seconds"),
    "retry_delay_max": (_is_positive, "a positive number of seconds"),
    "jitter_factor": (lambda value: _is_number(value) and 0 <= value <= 1, "a number in [0, 1]"),
    "enable_retry_logic": (_is_flag, "True or False"),
    "enable_stuck_detection": (_is_flag, "True or False"),
    "max_connections": (
        lambda value: _is_count_or_none(value, 1),
        "a whole number of 1 or more, or None",
    ),
    "max_retries": (
        lambda value: _is_count_or_none(value, 0),
        "a whole number of 0 or more, or None",
    ),
}


@dataclass(frozen=True, slots=True)
class SampleRetryPolicy:
    """Policy for one sample, from submission to result: every temporary error is retried."""

    config: RetryConfig
    billing_window: float = 3600.0

    def wait_before_retry(self, error: Exception, tried: Tried) -> float | None:
        config = self.config
        if isinstance(error, BillingError):  # a pause, not a retry
            return billing_wait(tried.elapsed, self.billing_window)
        if not _may_retry(config, tried):
            return None
        if not (isinstance(error, config.retryable_exceptions) or may_pass(error)):
            return None
        delay = exponential(tried.attempt, config.retry_delay_base, config.retry_delay_max)
        jittered = delay + delay * config.jitter_factor * (2 * tried.chance - 1)
        return max(0.0, min(jittered, config.retry_delay_max))


@dataclass(frozen=True, slots=True)
class ThrottlePolicy:
    """Policy for the dispatch of one sample: a 429 asks to slow down and is not an error, unless retries are off.

    The wait is 0 because the sample budget delays the next dispatch, for all samples together.
    """

    config: RetryConfig

    def wait_before_retry(self, error: Exception, tried: Tried) -> float | None:
        throttled = isinstance(error, TinkerError) and error.status_code == 429
        return 0.0 if throttled and _may_retry(self.config, tried) else None


def _may_retry(config: RetryConfig, tried: Tried) -> bool:
    spent = config.max_retries is not None and tried.attempt >= config.max_retries
    return config.enable_retry_logic and not spent
