"""Exceptions worth reporting: whose fault they are, and catching them on their way out of a program."""

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

#: Statuses of the 400s that say "not now" and not "not like this".
_NOT_THE_USERS: Final = frozenset({408, 429})
_KEY: Final = re.compile(r"\b(?:tml-|eyJ)[\w.-]+")


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, and depth first what caused it and what it happened in; each once."""
    seen: set[int] = set()
    stack: list[object] = [error]
    while stack:
        each = stack.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            reason = getattr(each, "reason", None)  # where other libraries keep the cause
            stack += [reason, each.__context__, each.__cause__]


def user_error_in(error: BaseException) -> BaseException | None:
    """The part of an exception's chain that says that the caller, not the program, was wrong."""
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
    """A text without keys: one may stand in the line of code that a traceback shows."""
    return _KEY.sub(REDACTED, text)


def concerns_tinkex(error: BaseException) -> bool:
    """Whether an exception came through this package; others are nobody's business here."""
    return any(
        frame.f_globals.get("__name__", "").partition(".")[0] == "tinkex"
        for each in chain_of(error)
        for frame, _ in traceback.walk_tb(each.__traceback__)
    )


# -- around a piece of code ------------------------------------------------------------------------


class capture_exceptions:  # noqa: N801 - used like a function
    """Report exceptions that leave a block or a function, sync or async, and let them pass.

    >>> with capture_exceptions(client.get_telemetry()):
    ...     train(client)

    Without a reporter it does nothing. A `fatal` one ends the session's report and is shipped before it is
    raised further.
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
        # A fatal one waits for the service, which must not hold up the loop.
        return await asyncio.to_thread(self.__exit__, kind, error, trace) if error else False


with_telemetry = capture_exceptions


# -- out of the program ----------------------------------------------------------------------------

_reporters: WeakSet[Reporter] = WeakSet()
_installed = False


def report_endings_to(reporter: Reporter) -> None:
    """Tell `reporter` of exceptions that nobody catches, and ship what it has when the program ends."""
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
                each.log_exception(error)  # shipped at exit, which is now

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        others_thread_hook(args)
        if isinstance(args.exc_value, Exception) and concerns_tinkex(args.exc_value):
            for each in list(_reporters):
                each.log_exception(args.exc_value)

    sys.excepthook, threading.excepthook = hook, thread_hook


def _ship_the_rest() -> None:
    """All reporters together get the time of one."""
    deadline = monotonic() + max((each.limits.stop for each in _reporters), default=0.0)
    for each in list(_reporters):
        each.stop(max(0.0, deadline - monotonic()))
