"""Exceptions worth reporting: whose fault they are, and hooks that catch them before the program ends."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar
from weakref import WeakSet

from tinkex.config import REDACTED

if TYPE_CHECKING:
    from .reporter import Reporter

__all__ = [
    "capture_exceptions",
    "concerns_tinkex",
    "report_endings_to",
    "user_error_in",
    "with_telemetry",
    "without_keys",
]

F = TypeVar("F", bound=Callable[..., Any])

#: 4xx statuses that mean "later", not "wrong request".
_NOT_THE_USERS: Final = frozenset({408, 429})
_KEY: Final = re.compile(r"\b(?:tml-|eyJ)[\w.-]+")


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An exception and, depth first, its causes and contexts; each once."""
    seen: set[int] = set()
    stack: list[object] = [error]
    while stack:
        each = stack.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            reason = getattr(each, "reason", None)  # other libraries keep the cause there
            stack += [reason, each.__context__, each.__cause__]


def user_error_in(error: BaseException) -> BaseException | None:
    """The exception in a chain that shows that the caller, not the program, is at fault."""
    return next((each for each in chain_of(error) if _is_users(each)), None)


def _is_users(error: BaseException) -> bool:
    category = getattr(error, "category", None)
    if str(getattr(category, "value", category)).lower() == "user":
        return True
    if getattr(error, "user_error", False) is True:
        return True
    status = getattr(error, "status_code", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in _NOT_THE_USERS


def without_keys(text: str) -> str:
    """A text without keys: a traceback may show a line of code that contains one."""
    return _KEY.sub(REDACTED, text)


def concerns_tinkex(error: BaseException) -> bool:
    """Whether an exception passed through this package; others are not reported."""
    return any(
        frame.f_globals.get("__name__", "").partition(".")[0] == "tinkex"
        for each in chain_of(error)
        for frame, _ in traceback.walk_tb(each.__traceback__)
    )


# -- around a block of code ------------------------------------------------------------------------


class capture_exceptions:  # noqa: N801 - used like a function
    """Report exceptions that leave a block or a function, sync or async, and re-raise them.

    >>> with capture_exceptions(client.get_telemetry()):
    ...     train(client)

    Without a reporter it does nothing. With `fatal`, the exception also ends the session's report, and the block
    waits until the report is sent.
    """

    def __init__(
        self, reporter: Reporter | None, *, fatal: bool = False, severity: str = "ERROR"
    ) -> None:
        self._reporter = reporter
        self._fatal = fatal
        self._severity = severity

    def __call__(self, function: F) -> F:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def observed(*args: Any, **kwargs: Any) -> Any:
                async with self:
                    return await function(*args, **kwargs)
        else:

            @functools.wraps(function)
            def observed(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        return observed  # type: ignore[return-value]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if self._reporter is not None and isinstance(error, Exception):
            if self._fatal:
                self._reporter.log_fatal_exception(error, self._severity)
            else:
                self._reporter.log_exception(error, self._severity)
        return False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        # A fatal exception waits for the service, which must not block the event loop.
        return await asyncio.to_thread(self.__exit__, kind, error, trace) if error else False


with_telemetry = capture_exceptions


# -- at the end of the program --------------------------------------------------------------------

_reporters: WeakSet[Reporter] = WeakSet()
_installed = False


def report_endings_to(reporter: Reporter) -> None:
    """Report uncaught exceptions to `reporter`, and send its queue when the program ends."""
    global _installed  # noqa: PLW0603
    _reporters.add(reporter)
    if _installed:
        return
    _installed = True
    atexit.register(_ship_the_rest)
    others_hook, others_thread_hook = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        others_hook(kind, error, trace)
        if isinstance(error, Exception) and concerns_tinkex(error):
            for each in list(_reporters):
                each.log_exception(error)  # sent at exit, which follows

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        others_thread_hook(args)
        if isinstance(args.exc_value, Exception) and concerns_tinkex(args.exc_value):
            for each in list(_reporters):
                each.log_exception(args.exc_value)

    sys.excepthook, threading.excepthook = hook, thread_hook


def _ship_the_rest() -> None:
    """All reporters share the time limit of one."""
    deadline = monotonic() + max((each.limits.stop for each in _reporters), default=0.0)
    for each in list(_reporters):
        each.stop(max(0.0, deadline - monotonic()))
