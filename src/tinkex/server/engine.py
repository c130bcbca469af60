"""The engine under supervision: started, watched, and started again when it dies.

Each start is a new life with an empty memory. Whoever had something in the old one — a model, an open sampler —
sees that the life has changed and brings it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from tinkex.engine.base_models import BaseModel
from tinkex.engine.process import Ready
from tinkex.errors import (
    InvalidInputError,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
)

from .worker import EngineDiedError, Worker

__all__ = ["Supervisor"]

T = TypeVar("T")
logger = logging.getLogger("tinkex.server")

#: How often one request may see the engine die before it is taken for the cause.
DEATHS_ALLOWED: Final = 5


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

    # -- models ------------------------------------------------------------------------------

    @property
    def models(self) -> list[BaseModel]:
        return list(self._models.values())

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
        async with self._adding:
            if name not in self._models:
                self._models[name] = await self.persist(
                    lambda: self.worker.call("add_base_model", name)
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
        for _ in range(DEATHS_ALLOWED):
            await self._alive.wait()
            life = self.life
            try:
                return await work()
            except NotFoundError:  # of something that only the engine before this one knew?
                if self.life == life:
                    raise
            except EngineDiedError:
                if self.stopping:
                    raise asyncio.CancelledError from None
                if self.worker.died.is_set():  # the watch may not have seen it yet
                    self._alive.clear()
        raise RequestFailedError(
            f"The engine's process died {DEATHS_ALLOWED} times while it worked on this request; "
            "it is not tried again. Out of memory is the usual reason: send shorter sequences or fewer "
            "at a time.",
            category=RequestErrorCategory.Server,
        )
