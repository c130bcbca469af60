"""Who is told of what. The client asks `wants` before it makes an event, so silence costs one lookup.

    >>> number = attach(print, events.QueueStateChange)
    >>> detach(number)
    True

A handler runs where the event happens, mostly on the client's own event loop: it should be quick and must not
wait. One that raises is logged the first time and otherwise ignored.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakSet

from .events import Event, concrete

__all__ = ["Collector", "Subscriber", "attach", "detach", "emit", "lock", "wants"]

_logger = logging.getLogger("tinkex")
_locks: WeakSet[Any] = WeakSet()
#: A collector counts when so many events have gathered.
_MANY: Final = 1000


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


class _Subscription:
    __slots__ = ("handler", "kinds", "silenced")

    def __init__(self, handler: Callable[[Any], object], kinds: tuple[type[Event], ...]) -> None:
        self.handler = handler
        self.kinds = kinds
        self.silenced = False

    def complain(self) -> None:
        if not self.silenced:
            self.silenced = True
            _logger.exception("A telemetry handler failed; this is said once: %r", self.handler)


_numbers = itertools.count(1)
_subscriptions: Final[dict[int, _Subscription]] = {}
_changing = lock()
#: By event what listens to it; what several events have in common is there while any of them is listened to.
_listening: Final[dict[type[Event], tuple[_Subscription, ...]]] = {}

#: `wants(kind)`: whether anybody listens to events of that class. One lookup in C, for the hot paths.
wants: Final[Callable[[type[Event]], bool]] = _listening.__contains__


def attach(handler: Callable[[Any], object], *kinds: type[Event]) -> int:
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
        _update()
    return found


def emit(event: Event) -> None:
    for subscription in _listening.get(type(event), ()):
        try:
            subscription.handler(event)
        except Exception:  # an observer's trouble is not the work's
            subscription.complain()


def _update() -> None:
    wanted: dict[type[Event], tuple[_Subscription, ...]] = {}
    for kind in concrete():
        told = tuple(each for each in _subscriptions.values() if issubclass(kind, each.kinds))
        if told:
            wanted[kind] = told
            for parent in kind.__mro__[1:]:
                if issubclass(parent, Event):
                    wanted.setdefault(parent, ())
    _listening.update(wanted)
    for kind in _listening.keys() - wanted.keys():
        del _listening[kind]


class Subscriber:
    """Something that listens from `attach` to `detach`, or inside a `with` block."""

    _subscriptions: tuple[int, ...] = ()

    def handlers(self) -> Mapping[type[Event], Callable[[Any], object]]:
        """What it does on which event."""
        raise NotImplementedError

    def attach(self) -> Self:
        if not self._subscriptions:
            handlers = self.handlers().items()
            self._subscriptions = tuple(attach(handler, kind) for kind, handler in handlers)
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


class Collector(Subscriber):
    """A subscriber that counts: it looks at many events at a time, which costs a fraction of looking at each."""

    def __init__(self) -> None:
        self._lock = lock()
        self._heard: deque[Event] = deque()

    def kinds(self) -> Iterable[type[Event]]:
        """What it listens to."""
        raise NotImplementedError

    def count(self, events: list[Any]) -> None:
        """Count events, in the order in which they happened; the lock is held."""
        raise NotImplementedError

    def handlers(self) -> Mapping[type[Event], Callable[[Any], object]]:
        return dict.fromkeys(self.kinds(), self._hear)

    def _hear(self, event: Event) -> None:
        self._heard.append(event)
        if len(self._heard) >= _MANY:
            self.flush()

    def flush(self) -> None:
        """Count everything that was heard until now."""
        with self._lock:
            self.count([self._heard.popleft() for _ in range(len(self._heard))])
