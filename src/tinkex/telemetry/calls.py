"""Events about one call and about its attempts.

The current call is a context variable of the task that does its work, so that requests, promises and retries
below it can name the call they belong to.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar

from tinkex.errors import TinkerError
from tinkex.telemetry.lazy_events import event_types

from .bus import emit, wants

__all__ = [
    "ClientCall",
    "EventClock",
    "add_metadata",
    "attempt_events",
    "current_call",
    "current_metadata",
    "metadata",
    "next_id",
    "observed",
]

T = TypeVar("T")

_NOTHING: Final[Mapping[str, Any]] = {}
#: An id that is unique in this process; all events of one call or request share it.
next_id: Final = itertools.count(1).__next__


class EventClock(Protocol):
    """The part of the client's clock that events need."""

    @property
    def monotonic(self) -> Callable[[], float]: ...
    @property
    def wall(self) -> Callable[[], float]: ...


@dataclass(slots=True)
class ClientCall:
    """One call of a client's method, from the caller's thread to its result."""

    id: int
    operation: str
    metadata: Mapping[str, Any]
    started: float


_call: ContextVar[ClientCall | None] = ContextVar("call", default=None)
#: The call that the current task works for, if any.
current_call: Final = _call.get
_given: ContextVar[Mapping[str, Any]] = ContextVar("given", default=_NOTHING)


def current_metadata() -> Mapping[str, Any]:
    call = _call.get()
    return _NOTHING if call is None else call.metadata


def add_metadata(**more: Any) -> None:
    """Add metadata to the current call; other tasks of the same call do not see it."""
    call = _call.get()
    if call is not None:
        known = {**call.metadata, **more}
        _call.set(ClientCall(call.id, call.operation, known, call.started))


@contextmanager
def metadata(**values: Any) -> Iterator[None]:
    """Add `values` to the events of all calls made inside the block; they replace values of the same name.

    >>> with metadata(phase="evaluation"):
    ...     sampler.sample(prompt)
    """
    token = _given.set({**_given.get(), **values})
    try:
        yield
    finally:
        _given.reset(token)


def observed(
    operation: str,
    work: Callable[[], Awaitable[T]],
    clock: EventClock,
    facts: Mapping[str, Any],
    report: Callable[[ClientCall, T, float], object] | None = None,
) -> Coroutine[Any, Any, T]:
    """Run `work()` and emit its start, stop and exception. Its duration counts from now.

    The caller's `metadata` replaces `facts` of the same name. `report(call, result, seconds)` may emit more events
    about the result.
    """
    given = _given.get()
    call = ClientCall(
        next_id(), operation, {**facts, **given} if given else facts, clock.monotonic()
    )
    return _observe(call, work, clock, report)


async def _observe(
    call: ClientCall,
    work: Callable[[], Awaitable[T]],
    clock: EventClock,
    report: Callable[[ClientCall, T, float], object] | None,
) -> T:
    _call.set(call)
    if wants(event_types.OperationStart):
        called = clock.wall() - (clock.monotonic() - call.started)
        emit(event_types.OperationStart(call.id, call.operation, called, metadata=call.metadata))
    try:
        result = await work()
    except BaseException as error:
        if wants(event_types.OperationException):
            seconds = clock.monotonic() - call.started
            emit(
                event_types.OperationException(
                    call.id, call.operation, seconds, error, metadata=current_metadata()
                )
            )
        raise
    seconds = clock.monotonic() - call.started
    if report is not None:
        report(call, result, seconds)
    if wants(event_types.OperationStop):
        emit(
            event_types.OperationStop(call.id, call.operation, seconds, metadata=current_metadata())
        )
    return result


class AttemptEvents:
    """Emits an event for every attempt of the retry loop."""

    @staticmethod
    def started(clock: EventClock, attempt: int) -> None:
        if wants(event_types.RetryAttemptStart):
            emit(
                event_types.RetryAttemptStart(
                    *_attempt(attempt), clock.wall(), metadata=current_metadata()
                )
            )

    @staticmethod
    def succeeded(clock: EventClock, attempt: int, began: float) -> None:
        if wants(event_types.RetryAttemptStop):
            seconds = clock.monotonic() - began
            emit(
                event_types.RetryAttemptStop(
                    *_attempt(attempt), seconds, metadata=current_metadata()
                )
            )

    @staticmethod
    def failed(attempt: int, seconds: float, error: Exception, wait: float | None) -> None:
        """An attempt failed; the next one starts after `wait` seconds, or never if `wait` is None."""
        if not wants(event_types.RetryEvent):
            return
        facts, metadata = _attempt(attempt), current_metadata()
        if wait is not None:
            emit(event_types.RetryAttemptRetry(*facts, seconds, wait, error, metadata=metadata))
            return
        expected = isinstance(error, TinkerError)
        result: Literal["failed", "exception"] = "failed" if expected else "exception"
        emit(event_types.RetryAttemptFailed(*facts, seconds, result, error, metadata=metadata))


attempt_events: Final = AttemptEvents()


def _attempt(attempt: int) -> tuple[str | None, int]:
    call = _call.get()
    return None if call is None else call.operation, attempt
