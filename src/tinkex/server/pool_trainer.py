"""Training on a pool: each model lives on one engine, and idle engines help with its large passes.

A model's adapter and optimizer are on its home. A new model gets the engine with the shortest line and the fewest
models. When an engine dies, only its models are lost; each is restored on an engine that works.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.interface import IN_LINE, EngineDiedError, EngineLease
from tinkex.engine.parcels import Depot, Parcel, PublishedAdapter
from tinkex.engine.shards import Shard, ShardSums, divide
from tinkex.engine.values import (
    AdamStep,
    LoraSpec,
    PassResult,
    TracedGraph,
    TrainingPass,
)
from tinkex.errors import NotFoundError

from .members import Member, Members
from .routing import assign
from .visits import current_visit

__all__ = ["PoolTrainer"]

logger = logging.getLogger("tinkex.server")


@dataclass(eq=False)
class _Home:
    """Where a model lives; also the lease of it."""

    model_id: str
    member: Member
    base_model: str = ""
    lease: EngineLease | None = None
    turn: _Turn | None = None

    @property
    def lost(self) -> bool:
        return self.lease is None or self.lease.lost or self.member.gone


@dataclass(eq=False)
class _Turn:
    """A place in the line of a model's home; it moves along if the model is restored elsewhere."""

    home: _Home
    member: Member
    helped_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.member.load.in_line += 1
        self.home.turn = self

    def move(self, member: Member) -> None:
        self.member.load.in_line -= 1
        self.member = member
        self.member.load.in_line += 1

    def end(self) -> None:
        self.member.load.in_line -= 1
        self.home.turn = None


class PoolTrainer:
    """The interface `TrainingEngine` on a pool."""

    def __init__(
        self, members: Members, depot: Depot, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._members = members
        self._depot = depot
        self._clock = clock
        self._homes: dict[str, _Home] = {}

    def home(self, model_id: str) -> Member | None:
        """The engine that has a model in memory."""
        home = self._homes.get(model_id)
        return None if home is None or home.lost else home.member

    # -- lines -------------------------------------------------------------------------------

    def has_room(self, model_id: str) -> bool:
        return self._next_home(model_id).load.in_line < IN_LINE

    def take_turn(self, model_id: str) -> _Turn:
        home = self._homes.get(model_id)
        if home is None or home.lost:
            home = self._settle(model_id, self._next_home(model_id))
        return _Turn(home, home.member)

    def _next_home(self, model_id: str) -> Member:
        home = self._homes.get(model_id)
        if home is not None and (not home.lost or home.turn is not None):
            return home.member
        training = [member for member in self._members if member.trains]
        return min([member for member in training if member.up] or training, key=_crowd)

    def _settle(self, model_id: str, member: Member) -> _Home:
        """Make an engine the home of a model that is not in memory."""
        home = self._homes.get(model_id)
        if home is None:
            home = self._homes[model_id] = _Home(model_id, member)
        else:
            home.member.load.models -= 1
            home.member = member
            if home.turn is not None:
                home.turn.move(member)
        member.load.models += 1
        home.lease = None
        return home

    # -- models ------------------------------------------------------------------------------

    async def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> EngineLease:
        home = await self._new_home(model_id, base_model)
        home.lease = await home.member.engine.create_model(model_id, base_model, spec)
        return home

    async def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> EngineLease:
        home = await self._new_home(model_id, base_model)
        engine = home.member.engine
        home.lease = await engine.restore_model(
            model_id, base_model, directory, optimizer=optimizer
        )
        return home

    async def restore_snapshot(
        self, model_id: str, base_model: str, directory: Path
    ) -> EngineLease:
        home = await self._new_home(model_id, base_model)
        engine = home.member.engine
        home.lease = await engine.restore_snapshot(model_id, base_model, directory)
        return home

    async def _new_home(self, model_id: str, base_model: str) -> _Home:
        """An engine for a model that is loaded now; a suspected request stays with the engine that died."""
        home = self._homes.get(model_id)
        member = self._members.quarantine()
        if member is None and home is not None and home.member.up:
            member = (
                home.member
            )  # a checkpoint loaded into a model, or the place its turn was given
        if member is None:
            member = min(await self._members.some_up(lambda each: each.trains), key=_crowd)
        if home is None or home.member is not member:
            home = self._settle(model_id, member)
        await self._members.enter(member)
        await member.engine.catalog.model(base_model, "base_model")
        home.base_model = base_model
        return home

    async def unload_model(self, model_id: str) -> None:
        home = self._homes.pop(model_id, None)
        if home is not None:
            home.member.load.models -= 1
            await home.member.engine.unload_model(model_id)

    async def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]:
        home = await self._at_home(model_id)
        return await home.member.engine.optim_step(model_id, options)

    async def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int:
        home = await self._at_home(model_id)
        return await home.member.engine.save_state(model_id, directory, optimizer=optimizer)

    async def snapshot(self, model_id: str, directory: Path) -> int:
        home = await self._at_home(model_id)
        return await home.member.engine.snapshot(model_id, directory)

    async def check_traced(self, graph: TracedGraph) -> None:
        member = min(await self._members.some_up(lambda each: each.trains), key=_crowd)
        await self._members.enter(member)
        await member.engine.check_traced(graph)

    async def _at_home(self, model_id: str) -> _Home:
        home = self._homes.get(model_id)
        if home is None or home.lease is None:
            raise NotFoundError(f"There is no model {model_id!r:.200}.")
        if home.lost:
            raise EngineDiedError("The engine of this model has died.", cause_known=True)
        await self._members.enter(home.member)
        return home

    # -- passes ------------------------------------------------------------------------------

    async def run_pass(self, model_id: str, request: TrainingPass) -> PassResult:
        home = await self._at_home(model_id)
        helpers = self._helpers(home, request)
        shares = [] if not helpers else assign(self._shards(home, request), 1 + len(helpers))
        if len(shares) < 2:
            return await home.member.engine.run_pass(model_id, request)
        return await self._run_divided(home, request, shares, helpers)

    def _shards(self, home: _Home, request: TrainingPass) -> list[Shard]:
        return divide(request.examples, home.member.engine.ready.token_budget)

    def _helpers(self, home: _Home, request: TrainingPass) -> list[Member]:
        """Idle engines that compute what the home would; none for a request that may have killed one."""
        visit = current_visit()
        if (
            not home.member.engine.ready.token_budget
            or request.traced
            or (visit is not None and visit.deaths)
        ):
            return []
        return [
            member
            for member in self._members
            if member.trains
            and member.up
            and member is not home.member
            and not member.load.in_line
            and member.suspects.calm
            and member.engine.catalog.has(home.base_model)
            and _kind(member) == _kind(home.member)
        ]

    async def _run_divided(
        self,
        home: _Home,
        request: TrainingPass,
        shares: list[list[int]],
        helpers: list[Member],
    ) -> PassResult:
        """Compute the shards on several engines at once; the home adds their sums in order."""
        engine, model_id = home.member.engine, home.model_id
        publishing = asyncio.ensure_future(engine.publish(model_id))
        work = [asyncio.ensure_future(engine.run_shards(model_id, request, shares[0]))]
        for member, numbers in zip(helpers, shares[1:], strict=False):
            helping = self._help(member, home, publishing, request, numbers)
            work.append(asyncio.ensure_future(helping))
        # Wait for all of them: what a helper sends after the pass has failed would stay in the depot.
        results = await asyncio.gather(*work, return_exceptions=True)
        parts = [result for result in results if not isinstance(result, BaseException)]
        if len(parts) == len(results):
            return await engine.finish_pass(model_id, request, parts)
        for block in (block for part in parts for block in part.blocks):
            self._depot.drop(block.total)
        if isinstance(results[0], BaseException):
            raise results[0]
        for result in results:
            if isinstance(result, EngineDiedError):
                raise result
        logger.warning(
            "An engine could not help with a pass; its home computes all of it: %s", results
        )
        return await engine.run_pass(model_id, request)

    async def _help(
        self,
        member: Member,
        home: _Home,
        publishing: asyncio.Future[PublishedAdapter],
        request: TrainingPass,
        numbers: list[int],
    ) -> ShardSums[Parcel]:
        member.load.in_line += 1
        started = self._clock()
        try:
            await self._members.enter(member)
            return await member.engine.help_pass(await publishing, request, numbers)
        finally:
            member.load.in_line -= 1
            if home.turn is not None:
                home.turn.helped_seconds += self._clock() - started


def _crowd(member: Member) -> tuple[int, int, str]:
    return member.load.in_line, member.load.models, member.name


def _kind(member: Member) -> tuple[str, str, int]:
    facts = member.engine.ready
    return facts.device.partition(":")[0], facts.dtype, facts.token_budget
