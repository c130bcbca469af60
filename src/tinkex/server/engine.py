"""Supervises the engine process: starts it, watches it, and restarts it when it dies.

`Supervisor.life` counts the restarts. A restarted engine has an empty memory: the owner of a model or an open
sampler compares `life` and restores what it had loaded.

A stuck engine is killed, and the call that it was stuck in fails. Otherwise a death does not tell its cause: all calls
in flight are suspects and are retried. After each death fewer run at a time, until the cause runs alone and fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Final, Literal, TypeVar

from tinkex.engine.base_models import PreparedModel
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

#: Engine deaths during a request before it counts as the cause; at the last death it must have run alone.
DEATHS_ALLOWED: Final = 5
#: After a death, one in this many of the calls that were in flight may run at a time.
SMALLER: Final = 4


#: Used as the context length of a base model that is not loaded yet: more than any model has.
MAX_CONTEXT: Final = 1 << 24


class _SuspectGroup:
    """Limits how many calls use the engine at a time: no limit, unless some are suspected of killing it."""

    def __init__(self) -> None:
        self._inside = 0
        self._room = inf
        self._outside: deque[asyncio.Future[None]] = deque()
        self._suspects = 0
        self._last_death = -1, 0  # the life that ended, and how many calls were inside

    async def enter(self) -> None:
        while self._inside >= self._room:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._outside.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._call_in()  # this call may have been woken: pass its slot on
                raise
        self._inside += 1

    def leave(self) -> None:
        self._inside -= 1
        self._call_in()

    def alone_at_death(self, life: int) -> bool:
        """Whether only one call was inside when this life of the engine ended."""
        if life > self._last_death[0]:
            self._last_death = life, self._inside
            self._room = max(1, self._inside // SMALLER)
        return self._last_death == (life, 1)

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


class Supervisor:
    """One engine that survives the death of its process."""

    def __init__(self, worker: Worker, *, on_demand: bool = False) -> None:
        self.worker = worker
        self.on_demand = on_demand
        self.life = 0
        self.stopping = False
        self._alive = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._models: dict[str, PreparedModel] = {}
        self._adding = asyncio.Lock()
        self._suspects = _SuspectGroup()

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
                    logger.exception("The engine does not start; trying again in %.0f s.", pause)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, 60.0)
            self._alive.set()

    def check_health(self) -> EngineState:
        """The state of the engine; raises if it is dead or has been silent for half of its deadline."""
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
    def models(self) -> list[PreparedModel]:
        return list(self._models.values())

    def context_length(self, name: str) -> int:
        """The context length of a base model; `MAX_CONTEXT` if it is not loaded yet."""
        model = self._models.get(name)
        return MAX_CONTEXT if model is None else model.context_length

    def check_model(self, name: str, field: str) -> None:
        """Refuse a base model that this service cannot load."""
        if name not in self._models and not self.on_demand:
            raise InvalidInputError(
                f"this service does not have {name!r:.200}; it has {', '.join(self._models)}",
                field=field,
            )

    async def model(self, name: str, field: str) -> PreparedModel:
        """A base model; a service that loads models on demand fetches and loads it first."""
        self.check_model(name, field)
        if name in self._models:  # no lock: another model may be loading
            return self._models[name]
        async with self._adding:
            if name not in self._models:
                # A separate suspect group: a caller waiting for this load may itself hold a slot in the main one.
                self._models[name] = await self._persist(
                    lambda: self.worker.call("add_base_model", name), _SuspectGroup()
                )
                self.worker.also_serve(name)
        return self._models[name]

    # -- work --------------------------------------------------------------------------------

    async def call_now(self, method: str, *args: Any, **options: Any) -> None:
        """Call a quick method that frees something; does nothing if the engine is dead, because that freed it."""
        try:
            await self.worker.call_now(method, *args, **options)
        except EngineDiedError:
            return

    async def persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, which uses the engine; retry it if the engine dies, until it is found to be the cause."""
        return await self._persist(work, self._suspects)

    async def _persist(self, work: Callable[[], Awaitable[T]], group: _SuspectGroup) -> T:
        deaths, is_cause = 0, False
        try:
            while not is_cause:
                await group.enter()
                try:
                    await self._alive.wait()
                    life = self.life
                    return await work()
                except NotFoundError:  # perhaps the engine restarted and lost the object
                    if self.life == life:
                        raise
                except EngineDiedError as death:
                    if self.stopping:
                        raise asyncio.CancelledError from None
                    if self.worker.died.is_set():  # `_watch` may not have run yet
                        self._alive.clear()
                    if isinstance(death, EngineStuckError):
                        raise self._too_slow() from None
                    if death.cause_known:
                        continue  # another request is the cause; this one is no suspect
                    if not deaths:
                        group.suspect()
                    deaths += 1
                    is_cause = group.alone_at_death(life) and deaths >= DEATHS_ALLOWED
                finally:
                    group.leave()
        finally:
            if deaths:
                group.clear(cause=is_cause)
        raise RequestFailedError(
            f"The engine's process died {deaths} times while it worked on this request; "
            "the request is not retried. Out of memory is the usual cause: send shorter sequences or "
            "fewer at a time.",
            category=RequestErrorCategory.Server,
        )

    def _too_slow(self) -> RequestFailedError:
        return RequestFailedError(
            "The engine made no progress on this request for "
            f"{self.worker.watch.deadline:.0f} seconds and was killed; the request is not retried. "
            "Make it smaller; the limit is the service's setting engine_deadline.",
            category=RequestErrorCategory.User,
        )


def _unwell(message: str) -> APIStatusError:
    return APIStatusError(message, HTTPResponse(503))
