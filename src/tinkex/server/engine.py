"""The engine under supervision: started, watched, and started again when it dies.

Each start is a new life with an empty memory. Whoever had something in the old one — a model, an open sampler —
sees that the life has changed and brings it back.

An engine that is stuck is killed, and the call that it was stuck in fails. Otherwise a death says nothing of its cause:
everything that was under way is done again, but less of it at a time with each death, until the cause is alone and is
given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Final, Literal, TypeVar

from tinkex.engine.base_models import BaseModel
from tinkex.engine.process import Ready
from tinkex.errors import (
    APIStatusError,
    HTTPResponse,
    InvalidInputError,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
)

from .worker import EngineDiedError, EngineStuckError, Worker

__all__ = ["Supervisor"]

T = TypeVar("T")
EngineState = Literal["idle", "working"]
logger = logging.getLogger("tinkex.server")

#: How often a request may see the engine die, the last time alone, before it is taken for the cause.
DEATHS_ALLOWED: Final = 5
#: The part of those under way at a death that may be under way together after it.
SMALLER: Final = 4


#: Stands for the context of a base model that is not loaded yet.
MAX_CONTEXT: Final = 1 << 24


class _Company:
    """Who works with the engine at one time: everybody, unless somebody is suspected of killing it."""

    def __init__(self) -> None:
        self._inside = 0
        self._room = inf
        self._outside: deque[asyncio.Future[None]] = deque()
        self._suspects = 0
        self._last_death = -1, 0  # the life that ended, and how many were inside

    async def enter(self) -> None:
        while self._inside >= self._room:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._outside.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._call_in()  # whoever is next may have been passed over for this one
                raise
        self._inside += 1

    def leave(self) -> None:
        self._inside -= 1
        self._call_in()

    def alone_at_death(self, life: int) -> bool:
        """Whether somebody inside was the only one when a life ended."""
        if life > self._last_death[0]:
            self._last_death = life, self._inside
            self._room = max(1, self._inside // SMALLER)
        return self._last_death == (life, 1)

    def suspect(self) -> None:
        self._suspects += 1

    def clear(self, *, cause: bool) -> None:
        """One suspect less; after the cause was found, or with nobody left to suspect, all may enter again."""
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


class Supervisor:
    """One engine, whatever happens to its process."""

    def __init__(self, worker: Worker, *, on_demand: bool = False) -> None:
        self.worker = worker
        self.on_demand = on_demand
        self.life = 0
        self.stopping = False
        self._alive = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._models: dict[str, BaseModel] = {}
        self._adding = asyncio.Lock()
        self._company = _Company()

    async def start(self) -> Ready:
        ready = await self.worker.start()
        self._models = {model.name: model for model in ready.models}
        self._alive.set()
        self._watching = asyncio.create_task(self._watch())
        return ready

    async def stop(self) -> None:
        self.stopping = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.worker.stop()

    async def _watch(self) -> None:
        while True:
            await self.worker.died.wait()
            self._alive.clear()
            self.life += 1
            logger.error("The engine's process has died; starting it again.")
            await self.worker.stop()
            pause = 1.0
            while True:
                try:
                    await self.worker.start()
                    break
                except Exception:
                    logger.exception("The engine does not start; next try in %.0f s.", pause)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, 60.0)
            self._alive.set()

    def check_health(self) -> EngineState:
        """What the engine is doing; an error if it is dead, or has been silent for half of its deadline."""
        if not self._alive.is_set():
            raise _unwell("The engine is not running; it is being started.")
        silent, deadline = self.worker.watch.silent, self.worker.watch.deadline
        if silent > deadline / 2:
            raise _unwell(
                f"The engine has made no progress for {silent:.0f} seconds; "
                f"it is killed after {deadline:.0f} (the setting engine_deadline)."
            )
        return "working" if self.worker.busy else "idle"

    # -- models ------------------------------------------------------------------------------

    @property
    def models(self) -> list[BaseModel]:
        return list(self._models.values())

    def context_length(self, name: str) -> int:
        """The context of a base model; for one that is not loaded yet, more than any has."""
        model = self._models.get(name)
        return MAX_CONTEXT if model is None else model.context_length

    def check_model(self, name: str, field: str) -> None:
        """Refuse a base model that can never be had here."""
        if name not in self._models and not self.on_demand:
            raise InvalidInputError(
                f"this service does not have {name!r:.200}; it has {', '.join(self._models)}",
                field=field,
            )

    async def model(self, name: str, field: str) -> BaseModel:
        """A base model, fetched and loaded where that is done on demand."""
        self.check_model(name, field)
        if name in self._models:  # and need not wait while another is fetched
            return self._models[name]
        async with self._adding:
            if name not in self._models:
                # In a company of its own: whoever waits for it may be inside the other one.
                self._models[name] = await self._persist(
                    lambda: self.worker.call("add_base_model", name), _Company()
                )
                self.worker.also_serve(name)
        return self._models[name]

    # -- work --------------------------------------------------------------------------------

    async def call_now(self, method: str, *args: Any, **options: Any) -> None:
        """Ask for something quick; a dead engine has forgotten it anyway."""
        try:
            await self.worker.call_now(method, *args, **options)
        except EngineDiedError:
            return

    async def persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something with the engine, again if it dies meanwhile, but not for ever."""
        return await self._persist(work, self._company)

    async def _persist(self, work: Callable[[], Awaitable[T]], company: _Company) -> T:
        deaths, is_cause = 0, False
        try:
            while not is_cause:
                await company.enter()
                try:
                    await self._alive.wait()
                    life = self.life
                    return await work()
                except NotFoundError:  # of something that only the engine before this one knew?
                    if self.life == life:
                        raise
                except EngineDiedError as death:
                    if self.stopping:
                        raise asyncio.CancelledError from None
                    if self.worker.died.is_set():  # the watch may not have seen it yet
                        self._alive.clear()
                    if isinstance(death, EngineStuckError):
                        raise self._too_slow() from None
                    if death.cause_known:
                        continue  # another request was; this one is not suspected
                    if not deaths:
                        company.suspect()
                    deaths += 1
                    is_cause = company.alone_at_death(life) and deaths >= DEATHS_ALLOWED
                finally:
                    company.leave()
        finally:
            if deaths:
                company.clear(cause=is_cause)
        raise RequestFailedError(
            f"The engine's process died {deaths} times while it worked on this request; "
            "it is not tried again. Out of memory is the usual reason: send shorter sequences or fewer "
            "at a time.",
            category=RequestErrorCategory.Server,
        )

    def _too_slow(self) -> RequestFailedError:
        return RequestFailedError(
            "The engine made no progress on this request for "
            f"{self.worker.watch.deadline:.0f} seconds and was killed; the request is not tried again. "
            "Make it smaller; the limit is the service's setting engine_deadline.",
            category=RequestErrorCategory.User,
        )


def _unwell(message: str) -> APIStatusError:
    return APIStatusError(message, HTTPResponse(503))
