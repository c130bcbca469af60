"""The retry loop for the caller's own functions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, overload

from tinkex._retry import Clock, retrying
from tinkex.telemetry.calls import attempt_events, observed

from .retry import RetryConfig, SampleRetryPolicy
from .runtime import APIFuture, SampleFuture, TaskGroup, runtime

__all__ = ["with_retry"]

T = TypeVar("T")


@overload
def with_retry(
    function: Callable[[], Awaitable[T]],
    retry_config: RetryConfig | None = None,
    *,
    telemetry_metadata: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> APIFuture[T]: ...


@overload
def with_retry(
    function: Callable[[], T],
    retry_config: RetryConfig | None = None,
    *,
    telemetry_metadata: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> APIFuture[T]: ...


def with_retry(
    function: Callable[[], Any],
    retry_config: RetryConfig | None = None,
    *,
    telemetry_metadata: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> APIFuture[Any]:
    """Call `function()` until it succeeds, with the limits in `retry_config`; returns a future of its result.

    The function runs on a worker thread; a coroutine function gets its own event loop there. Lost connections, timeouts,
    temporary statuses and `retry_config.retryable_exceptions` are retried. Any other error is raised unchanged, and so
    is the last error when the retries or the `progress_timeout` are used up. Cancelling the future stops the retries.
    Each attempt emits a `RetryEvent` with `telemetry_metadata`.
    """
    config, timing = retry_config or RetryConfig(), clock or Clock()
    policy = SampleRetryPolicy(config, billing_window=0.0)

    async def attempts() -> Any:
        deadline = timing.monotonic() + config.progress_timeout
        return await retrying(
            lambda _: asyncio.to_thread(_called, function),
            policy,
            timing,
            deadline=deadline,
            events=attempt_events,
        )

    name = getattr(function, "__name__", type(function).__name__)
    work = observed(name, attempts, timing, dict(telemetry_metadata or {}))
    return runtime().submit(work, SampleFuture(), TaskGroup())


def _called(function: Callable[[], Any]) -> Any:
    returned = function()
    return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(work: Awaitable[T]) -> T:
    return await work
