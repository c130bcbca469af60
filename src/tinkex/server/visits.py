"""Finds the request that kills engines of a pool, without slowing the engines that it has not touched.

Each engine has its own group of suspects. A piece of work enters the group of an engine when it first uses it. After a
death the work that was inside is suspected: it stays with that engine while it is retried, so a request that kills
engines kills one of them, not all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from tinkex.engine.interface import EngineDiedError

from .suspects import DEATHS_ALLOWED, SuspectGroup

__all__ = ["Visit", "VisitedEngine", "current_visit", "visiting"]


class VisitedEngine(Protocol):
    """An engine that work can be inside of."""

    @property
    def name(self) -> str: ...
    @property
    def suspects(self) -> SuspectGroup: ...


class Visit:
    """One piece of work: the engines it is inside of now, and those that died meanwhile."""

    def __init__(self) -> None:
        self._inside: dict[str, VisitedEngine] = {}
        self._suspected: dict[str, VisitedEngine] = {}
        self.deaths = 0
        #: The engine that died last while this work was inside: it is retried there.
        self.quarantine: str | None = None

    async def enter(self, place: VisitedEngine) -> None:
        """Wait until this work may use an engine; it stays inside until `leave`."""
        if place.name not in self._inside:
            await place.suspects.enter()
            self._inside[place.name] = place

    def leave(self) -> None:
        for place in self._inside.values():
            place.suspects.leave()
        self._inside.clear()

    def died(self, death: EngineDiedError) -> bool:
        """Note a death; return whether this work is found to be the cause."""
        place = self._inside.get(death.engine)
        if place is None or death.cause_known:
            return False
        if place.name not in self._suspected:
            place.suspects.suspect()
            self._suspected[place.name] = place
        self.deaths += 1
        self.quarantine = place.name
        alone = place.suspects.alone_at_death(death.engine, death.life)
        return alone and self.deaths >= DEATHS_ALLOWED

    def end(self, *, cause: bool) -> None:
        """Leave all groups; this work is no suspect any more."""
        self.leave()
        for place in self._suspected.values():
            place.suspects.clear(cause=cause)
        self._suspected.clear()


_CURRENT: Final[ContextVar[Visit | None]] = ContextVar("tinkex_visit", default=None)


def current_visit() -> Visit | None:
    return _CURRENT.get()


@contextmanager
def visiting() -> Iterator[Visit]:
    """A visit that the calls inside the block belong to."""
    visit = Visit()
    token = _CURRENT.set(visit)
    try:
        yield visit
    finally:
        _CURRENT.reset(token)
