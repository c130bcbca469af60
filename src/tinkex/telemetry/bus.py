"""The event bus. The client calls `wants` before it creates an event, so without subscribers it costs one lookup.

    >>> number = attach(print, events.QueueStateChange)
    >>> detach(number)
    True

A handler runs where the event occurs, mostly on the client's own event loop: it must be quick and must not
block. The first exception of a handler is logged; later ones are ignored.

Subscribers that only count need not see every event at once. A `Collector` gets events in batches, and not as
event objects but as the `partial` calls that would create them; it reads their arguments. That saves most of the
work when a client sends thousands of requests per second.
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

from tinkex.telemetry.lazy_events import event_types

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
#: A collector counts its events in batches of this size.
_MANY: Final = 1000

Handler: TypeAlias = Callable[[Any], object]
#: The call that makes an event, with its positional fields in `args` and the metadata in `keywords`.
Unmade: TypeAlias = "partial[Any]"


def lock() -> threading.Lock:
    """A lock that is released in a forked child, even if a thread of the parent holds it."""
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
    kinds: tuple[type[event_types.Event], ...]


class _Listeners(NamedTuple):
    handlers: tuple[Handler, ...] = ()
    collectors: tuple[Collector, ...] = ()


_NOBODY: Final = _Listeners()
_numbers = itertools.count(1)
_subscriptions: Final[dict[int, _Subscription]] = {}
_changing = lock()
#: The listeners of each event class. A base class is a key while any class derived from it has a listener.
_listening: Final[dict[type[event_types.Event], _Listeners]] = {}
#: Subscriptions whose handler has failed: the failure is logged once.
_failed: Final[set[int]] = set()

#: `wants(kind)`: whether there is a subscriber for events of that class. One lookup in C, for the hot paths.
wants: Final[Callable[[type[event_types.Event]], bool]] = _listening.__contains__


def attach(handler: Handler, *kinds: type[event_types.Event]) -> int:
    """Call `handler(event)` for every event of these classes (default: all). Returns the number for `detach`."""
    with _changing:
        number = next(_numbers)
        _subscriptions[number] = _Subscription(handler, kinds or (event_types.Event,))
        _update()
    return number


def detach(number: int) -> bool:
    """End a subscription. Returns whether it existed."""
    with _changing:
        found = _subscriptions.pop(number, None) is not None
        _failed.discard(number)
        _update()
    return found


def emit(event: event_types.Event) -> None:
    """Send an event to all its subscribers."""
    handlers, collectors = _listening.get(type(event), _NOBODY)
    if collectors:
        args = (getattr(event, name) for name in event.places)
        tell(partial(type(event), *args, metadata=event.metadata))
    else:
        _call(handlers, event)


def tell(unmade: Unmade) -> None:
    """`emit` for an event that is only created if a handler needs it; all its fields are positional."""
    handlers, collectors = _listening.get(unmade.func, _NOBODY)  # type: ignore[call-overload]
    for collector in collectors:
        heard = collector.heard
        heard.append(unmade)
        if len(heard) >= _MANY:
            _flush(collector)
    if handlers:
        _call(handlers, unmade())


def _call(handlers: tuple[Handler, ...], event: event_types.Event) -> None:
    for handler in handlers:
        try:
            handler(event)
        except Exception:  # a handler must not break the work
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
            _logger.exception("A telemetry handler failed (logged once): %r", handler)


def _update() -> None:
    wanted: dict[type[event_types.Event], _Listeners] = {}
    for kind in event_types.concrete():
        told = [each.handler for each in _subscriptions.values() if issubclass(kind, each.kinds)]
        if told:
            wanted[kind] = _Listeners(
                tuple(each for each in told if not isinstance(each, Collector)),
                tuple(each for each in told if isinstance(each, Collector)),
            )
            for parent in kind.__mro__[1:]:
                if issubclass(parent, event_types.Event):
                    wanted.setdefault(parent, _NOBODY)
    _listening.update(wanted)
    for kind in _listening.keys() - wanted.keys():
        del _listening[kind]


class _Attached:
    """Subscribed from `attach` to `detach`, or inside a `with` block."""

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
    """Has one handler per event class."""

    def handlers(self) -> Mapping[type[event_types.Event], Handler]:
        raise NotImplementedError

    def _subscribe(self) -> tuple[int, ...]:
        return tuple(attach(handler, kind) for kind, handler in self.handlers().items())


class Collector(_Attached):
    """Counts events in batches."""

    #: The event classes it subscribes to.
    kinds: ClassVar[tuple[type[event_types.Event], ...]]

    def __init__(self) -> None:
        self._lock = lock()
        self.heard: list[Unmade] = []

    def count(self, kind: type[event_types.Event], events: list[Unmade]) -> None:
        """Count events of one class, in the order in which they occurred; the lock is held."""
        raise NotImplementedError

    def flush(self) -> None:
        """Count all events received so far."""
        with self._lock:
            events = self.heard[:]
            del self.heard[: len(events)]  # not `clear`: more may have arrived meanwhile
            kinds: list[Any] = [*map(attrgetter("func"), events)]
            for kind in dict.fromkeys(kinds):
                self.count(kind, [*compress(events, map(partial(is_, kind), kinds))])

    def _subscribe(self) -> tuple[int, ...]:
        return (attach(self, *self.kinds),)

    def __call__(self, event: event_types.Event) -> None:
        """Never called: a collector gets its events in batches."""
        raise NotImplementedError


def column(events: list[Unmade], name: str) -> Iterator[Any]:
    """One field of uncreated events, which are all of one class."""
    kind: Any = events[0].func
    return map(itemgetter(kind.places[name]), map(attrgetter("args"), events))
