"""A pool: several supervised engines behind the interface of one.

The worker of an engine knows where the engine runs. The pool decides which engine does what, and which work is retried
on another engine when one dies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol, TypeVar

from tinkex.engine.base_models import PreparedModel
from tinkex.engine.catalog import Catalog
from tinkex.engine.interface import (
    EngineDiedError,
    EngineState,
    EngineStatus,
    EngineStuckError,
)
from tinkex.engine.parcels import Depot
from tinkex.engine.shared_memory import SharedMemory
from tinkex.errors import APIStatusError, HTTPResponse

from .members import Member, Members
from .pool_sampler import PoolSampler
from .pool_trainer import PoolTrainer
from .suspects import too_many_deaths, too_slow
from .visits import visiting

__all__ = ["EnginePool", "Exchange"]

T = TypeVar("T")
logger = logging.getLogger("tinkex.server")

#: Of this many engines the health check says why they cannot serve; the list of engines says it of all.
_REASONS: Final = 3


class Exchange(Depot, Protocol):
    """Where the engines of a pool exchange adapters and gradients."""

    def open(self) -> None: ...
    def close(self) -> None: ...


class EnginePool:
    """The interface `Engines`, implemented by several engines."""

    def __init__(
        self, engines: Sequence[Member], exchange: Exchange, *, on_demand: bool = False
    ) -> None:
        self._exchange = exchange
        self._stopping = False
        self.members = self._members = Members()
        for member in engines:
            self._members.add(member)
        self._scratch = SharedMemory()
        self.trainer = PoolTrainer(self._members, exchange, self._scratch)
        self.sampler = PoolSampler(self._members, self.trainer)
        self.catalog = Catalog(self._load, on_demand=on_demand)

    @property
    def stopping(self) -> bool:
        return self._stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._stopping = value
        for member in self._members:
            member.engine.stopping = value

    # -- start and stop ----------------------------------------------------------------------

    async def start(self) -> None:
        """Start all engines; the first one alone, because it may have to prepare the base models on disk."""
        self._exchange.open()
        self._scratch.open()
        first, *others = self._members
        await first.engine.start()
        for member in others:
            member.engine.know(first.engine.ready.models)
        await asyncio.gather(*(member.engine.start() for member in others))
        self.catalog.add(first.engine.catalog.models)

    async def stop(self) -> None:
        self.stopping = True
        await self.sampler.stop()
        await self.trainer.stop()
        await asyncio.gather(*(member.engine.stop() for member in self._members))
        self._exchange.close()
        self._scratch.close()

    async def _load(self, name: str) -> PreparedModel:
        """Load a base model on one engine; others load it when a model or a sampler needs it there."""
        while True:
            members = await self._members.some_up(lambda each: each.trains)
            fewest = min(members, key=lambda each: (each.load.models, each.name))
            with suppress(EngineDiedError):  # it is lost
                return await self._members.base_model(fewest, name)

    # -- retries -----------------------------------------------------------------------------

    async def persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, which calls engines; retry it if one dies, until it is found to be the cause."""
        is_cause = False
        with visiting() as visit:
            try:
                while not is_cause:
                    try:
                        return await work()
                    except EngineStuckError as stuck:
                        raise too_slow(stuck.deadline) from None
                    except EngineDiedError as death:
                        if self._stopping:
                            raise asyncio.CancelledError from None
                        is_cause = visit.died(death)
                    finally:
                        visit.leave()
                    await asyncio.sleep(
                        0
                    )  # the death is noted before the next attempt looks for an engine
            finally:
                visit.end(cause=is_cause)
        raise too_many_deaths(visit.deaths)

    # -- status ------------------------------------------------------------------------------

    def check_health(self) -> EngineState:
        """Working if any engine is; raises a 503 if none can train or none can sample now."""
        well = [member for member in self._members if not member.unwell]
        if not any(member.trains for member in well) or not any(member.samples for member in well):
            reasons = [member.unwell[:500] for member in self._members if member not in well]
            raise APIStatusError(
                " ".join(["No engine can serve:", *reasons[:_REASONS]]), HTTPResponse(503)
            )
        states = [member.engine.check_health() for member in well]
        return "working" if "working" in states else "idle"

    def status(self) -> list[EngineStatus]:
        return [status for member in self._members for status in member.status()]
