"""Finds the request that kills engines.

A death does not tell its cause: all work that was running is suspected and retried. After each death less of it runs at
a time, until the cause runs alone and fails. If an engine was killed because it was stuck in a call, that call is the
cause, and nothing else is suspected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, TypeVar

from tinkex.engine.interface import EngineDiedError, EngineStuckError
from tinkex.errors import RequestErrorCategory, RequestFailedError

__all__ = ["DEATHS_ALLOWED", "SuspectGroup", "too_many_deaths", "too_slow"]

T = TypeVar("T")

#: Engine deaths during a request before it counts as the cause; at the last death it must have run alone.
DEATHS_ALLOWED: Final = 5
#: After a death, one in this many of the requests that were running may run at a time.
SMALLER: Final = 4


class SuspectGroup:
    """Limits how much work uses the engines at a time: no limit, unless some is suspected of killing them."""

    def __init__(self) -> None:
        self._inside = 0
        self._room = inf
        self._outside: deque[asyncio.Future[None]] = deque()
        self._suspects = 0
        #: By engine: the number of its last life, and how many pieces of work were inside when that ended.
        self._last_death: dict[str, tuple[int, int]] = {}

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, which calls engines; retry it if one dies, until `work` is found to be the cause."""
        deaths, is_cause = 0, False
        try:
            while not is_cause:
                await self.enter()
                try:
                    return await work()
                except EngineStuckError as stuck:
                    raise too_slow(stuck.deadline) from None
                except EngineDiedError as death:
                    if death.cause_known:
                        continue  # another request is the cause; this one is no suspect
                    if not deaths:
                        self.suspect()
                    deaths += 1
                    alone = self.alone_at_death(death.engine, death.life)
                    is_cause = alone and deaths >= DEATHS_ALLOWED
                finally:
                    self.leave()
        finally:
            if deaths:
                self.clear(cause=is_cause)
        raise too_many_deaths(deaths)

    @property
    def calm(self) -> bool:
        """Whether nothing inside is suspected."""
        return not self._suspects

    async def enter(self) -> None:
        while self._inside >= self._room:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._outside.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._call_in()  # this work may have been woken: pass its slot on
                raise
        self._inside += 1

    def leave(self) -> None:
        self._inside -= 1
        self._call_in()

    def alone_at_death(self, engine: str, life: int) -> bool:
        """Whether nothing else was inside when this life of the engine ended."""
        last_life, _ = self._last_death.get(engine, (-1, 0))
        if life > last_life:
            self._last_death[engine] = life, self._inside
            self._room = max(1, self._inside // SMALLER)
        return self._last_death[engine] == (life, 1)

    def suspect(self) -> None:
        self._suspects += 1

    def clear(self, *, cause: bool) -> None:
        """Remove one suspect. Lift the limit if it was the cause, or if no suspects are left."""
        self._suspects -= 1
        if cause or not self._suspects:
            self._room = inf
            self._call_in()

    def _call_in(self) -> None:
        free = self._room - self._inside
        while self._outside and free > 0:
            turn = self._outside.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1


def too_many_deaths(deaths: int) -> RequestFailedError:
    return RequestFailedError(
        f"The engine's process died {deaths} times while it worked on this request; "
        "the request is not retried. Out of memory is the usual cause: send shorter sequences or "
        "fewer at a time.",
        category=RequestErrorCategory.Server,
    )


def too_slow(deadline: float) -> RequestFailedError:
    return RequestFailedError(
        f"The engine made no progress on this request for {deadline:.0f} seconds and was killed; "
        "the request is not retried. Make it smaller; the limit is the service's setting engine_deadline.",
        category=RequestErrorCategory.User,
    )
