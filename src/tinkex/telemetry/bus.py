"""Who is told of what. The client asks `wants` before it makes an event, so silence costs one lookup.

    >>> number = attach(print, events.QueueStateChange)
    >>> detach(number)
    True

A handler runs where the event happens, mostly on the client's own event loop: it should be quick and must not
wait. One that raises is logged the first time and otherwise ignored.

What only counts need not see every event at once. A `Collector` gets events in bulk, and gets them unmade: as
calls that would make them, whose arguments are all it needs. That is a fraction of the work where a client has
thousands of requests in a second.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import compress
from operator import attrgetter, is_, itemgetter
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeAlias
from weakref import WeakSet

from .events import Event, concrete

__all__ = [
    "Collector",
    "Subscriber",
    "Unmade",
    "attach",
    "column",
    "detach",
    "emit",
    "lock",
    "tell",
    "wants",
]

_logger = logging.getLogger("tinkex")
_locks: WeakSet[Any] = WeakSet()
#: A collector counts when so many events have gathered.
_MANY: Final = 1000

Handler: TypeAlias = Callable[[Any], object]
#: The call that makes an event, with its positional fields in `args` and the metadata in `keywords`.
Unmade: TypeAlias = "partial[Any]"


def lock() -> threading.Lock:
    """A lock that is free in a forked child, whoever held it in the parent."""
    made = threading.Lock()
    _locks.add(made)
    return made


def _free_locks() -> None:
    for each in list(_locks):
        each._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)


class _Subscription(NamedTuple):
    handler: Handler
    kinds: tuple[type[Event], ...]


class _Listeners(NamedTuple):
    handlers: tuple[Handler, ...] = ()
    collectors: tuple[Collector, ...] = ()


_NOBODY: Final = _Listeners()
_numbers = itertools.count(1)
_subscriptions: Final[dict[int, _Subscription]] = {}
_changing = lock()
#: By event who listens to it; what several events have in common is there while any of them is listened to.
_listening: Final[dict[type[Event], _Listeners]] = {}
#: Subscriptions whose handler has failed, which is said once.
_failed: Final[set[int]] = set()

#: `wants(kind)`: whether anybody listens to events of that class. One lookup in C, for the hot paths.
wants: Final[Callable[[type[Event]], bool]] = _listening.__contains__


def attach(handler: Handler, *kinds: type[Event]) -> int:
    """Call `handler(event)` for every event of these classes, or for all; the number to `detach` by."""
    with _changing:
        number = next(_numbers)
        _subscriptions[number] = _Subscription(handler, kinds or (Event,))
        _update()
    return number


def detach(number: int) -> bool:
    """End a subscription; whether there was one."""
    with _changing:
        found = _subscriptions.pop(number, None) is not None
        _failed.discard(number)
        _update()
    return found


def emit(event: Event) -> None:
    """Tell everybody who listens of an event."""
    handlers, collectors = _listening.get(type(event), _NOBODY)
    if collectors:
        args = (getattr(event, name) for name in event.places)
        tell(partial(type(event), *args, metadata=event.metadata))
    else:
        _call(handlers, event)


def tell(unmade: Unmade) -> None:
    """The same for an event that is made only if somebody looks at it; all fields by position."""
    handlers, collectors = _listening.get(unmade.func, _NOBODY)  # type: ignore[call-overload]
    for collector in collectors:
        heard = collector.heard
        heard.append(unmade)
        if len(heard) >= _MANY:
            _flush(collector)
    if handlers:
        _call(handlers, unmade())


def _call(handlers: tuple[Handler, ...], event: Event) -> None:
    for handler in handlers:
        try:
            handler(event)
        except Exception:  # an observer's trouble is not the work's
            _complain(handler)


def _flush(collector: Collector) -> None:
    try:
        collector.flush()
    except Exception:
        _complain(collector)


def _complain(handler: Handler) -> None:
    for number, subscription in list(_subscriptions.items()):
        if subscription.handler is handler and number not in _failed:
            _failed.add(number)
            _logger.exception("A telemetry handler failed; this is said once: %r", handler)


def _update() -> None:
    wanted: dict[type[Event], _Listeners] = {}
    for kind in concrete():
        told = [each.handler for each in _subscriptions.values() if issubclass(kind, each.kinds)]
        if told:
            wanted[kind] = _Listeners(
                tuple(each for each in told if not isinstance(each, Collector)),
                tuple(each for each in told if isinstance(each, Collector)),
            )
            for parent in kind.__mro__[1:]:
                if issubclass(parent, Event):
                    wanted.setdefault(parent, _NOBODY)
    _listening.update(wanted)
    for kind in _listening.keys() - wanted.keys():
        del _listening[kind]


class _Attached:
    """Listens from `attach` to `detach`, or inside a `with` block."""

    _subscriptions: tuple[int, ...] = ()

    def _subscribe(self) -> tuple[int, ...]:
        raise NotImplementedError

    def attach(self) -> Self:
        if not self._subscriptions:
            self._subscriptions = self._subscribe()
        return self

    def detach(self) -> None:
        for number in self._subscriptions:
            detach(number)
        self._subscriptions = ()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


class Subscriber(_Attached):
    """Something with a handler for each kind of event it listens to."""

    def handlers(self) -> Mapping[type[Event], Handler]:
        raise NotImplementedError

    def _subscribe(self) -> tuple[int, ...]:
        return tuple(attach(handler, kind) for kind, handler in self.handlers().items())


class Collector(_Attached):
    """Something that counts events, many at a time."""

    #: What it listens to.
    kinds: ClassVar[tuple[type[Event], ...]]

    def __init__(self) -> None:
        self._lock = lock()
        self.heard: list[Unmade] = []

    def count(self, kind: type[Event], events: list[Unmade]) -> None:
        """Count events of one kind, in the order in which they happened; the lock is held."""
        raise NotImplementedError

    def flush(self) -> None:
        """Count everything that was heard until now."""
        with self._lock:
            events = self.heard[:]
            del self.heard[: len(events)]  # not `clear`: more may have been heard meanwhile
            kinds: list[Any] = [*map(attrgetter("func"), events)]
            for kind in dict.fromkeys(kinds):
                self.count(kind, [*compress(events, map(partial(is_, kind), kinds))])

    def _subscribe(self) -> tuple[int, ...]:
        return (attach(self, *self.kinds),)

    def __call__(self, event: Event) -> None:
        """Never called: what is collected is not handed over one by one."""
        raise NotImplementedError


def column(events: list[Unmade], name: str) -> Iterator[Any]:
    """One field of unmade events, which are all of one kind."""
    kind: Any = events[0].func
    return map(itemgetter(kind.places[name]), map(attrgetter("args"), events))
