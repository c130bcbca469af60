"""A pool: several supervised engines behind the interface of one.

The worker of an engine knows where the engine runs. The pool decides which engine does what, and which work is retried
on another engine when one dies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

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
        """Working if any engine is; raises if none can train or none can sample, or if one is stuck."""
        up = [member for member in self._members if member.up]
        if not any(member.trains for member in up) or not any(member.samples for member in up):
            down = ", ".join(member.name for member in self._members if not member.up)
            raise APIStatusError(
                f"No engine can serve; being started: {down}.{self._trouble()}", HTTPResponse(503)
            )
        states = [member.engine.check_health() for member in up]
        return "working" if "working" in states else "idle"

    def _trouble(self) -> str:
        """Why engines do not start, if that is known."""
        reasons = {member.engine.trouble for member in self._members} - {""}
        return "".join(f" {reason[:500]}" for reason in sorted(reasons)[:3])

    def status(self) -> list[EngineStatus]:
        return [status for member in self._members for status in member.status()]
