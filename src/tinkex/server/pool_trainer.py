"""Training on a pool: each model lives on one engine, and idle engines help with its large passes.

The engine that holds a model's adapter and optimizer is its home. A new model gets the engine with the shortest queue
and the fewest models. Between two steps a model whose home has a long queue may move to another engine. When an engine
dies, only its models are lost; each is restored on an engine that works.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final

from tinkex.engine.interface import (
    IN_LINE,
    EngineDiedError,
    EngineLease,
    EngineStuckError,
    Spot,
)
from tinkex.engine.parcels import Depot, Parcel, ParcelLostError, PublishedAdapter
from tinkex.engine.shards import Shard, ShardSums, divide
from tinkex.engine.shared_memory import SharedMemory
from tinkex.engine.values import (
    AdamStep,
    LoraSpec,
    PassJob,
    PassResult,
    TracedGraph,
)
from tinkex.errors import NotFoundError

from .members import Member, Members
from .routing import RECENT, assign, find_spot
from .visits import current_visit

__all__ = ["PoolTrainer"]

logger = logging.getLogger("tinkex.server")

#: Seconds for which no model moves to an engine that could not take one.
AVOIDING: Final = 60.0
#: Seconds that moving a model is expected to take, until one has moved and its time is known.
MOVING: Final = 0.2


@dataclass(eq=False)
class _Home:
    """The engine that holds a model; also the lease of the model."""

    model_id: str
    member: Member
    base_model: str = ""
    lease: EngineLease | None = None
    turn: _Turn | None = None
    #: Whether the model has no gradients. Only then does it move: there is less to copy, and no part of an unfinished
    #: pass can be lost.
    between_steps: bool = True
    #: Snapshots that its engine has yet to write.
    snapshots: int = 0

    @property
    def lost(self) -> bool:
        return self.lease is None or self.lease.lost or self.member.gone


@dataclass(eq=False)
class _Turn:
    """A place in the queue of an engine; it moves too if the model is restored on another engine."""

    home: _Home
    member: Member
    clock: Callable[[], float]
    helped_seconds: float = 0.0
    joined_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.joined_at = self.clock()
        self.member.load.line.join()
        self.home.turn = self

    def move(self, member: Member) -> None:
        line, now = self.member.load.line, self.clock()
        self.helped_seconds += line.leave(self.joined_at, now)
        self.member, self.joined_at = member, now
        member.load.line.join()

    def end(self) -> float:
        self.home.turn = None
        return self.helped_seconds + self.member.load.line.leave(self.joined_at, self.clock())


class PoolTrainer:
    """The interface `TrainingEngine` on a pool."""

    def __init__(
        self,
        members: Members,
        depot: Depot,
        scratch: SharedMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._depot = depot
        self._scratch = scratch
        self._clock = clock
        self._homes: dict[str, _Home] = {}
        #: Why other engines could not help with the last large pass.
        self._unhelped = ""
        #: Seconds that moving a model took lately.
        self._moving = MOVING
        #: When an engine, by its name, last failed to take a model.
        self._refused: dict[str, float] = {}
        #: Parts of cancelled passes that helpers still compute.
        self._abandoned: set[asyncio.Task[None]] = set()

    def home(self, model_id: str) -> Member | None:
        """The engine that has a model in memory."""
        home = self._homes.get(model_id)
        return None if home is None or home.lost else home.member

    async def stop(self) -> None:
        for task in self._abandoned:
            task.cancel()
        await asyncio.gather(*self._abandoned, return_exceptions=True)

    # -- lines -------------------------------------------------------------------------------

    def spots(self, model_ids: Sequence[str]) -> list[Spot | None]:
        training = [member for member in self._members if member.trains]
        working = [member for member in training if member.up] or training
        shortest = min(working, key=_crowd)
        if shortest.load.in_line >= IN_LINE:
            return [None] * len(model_ids)
        taking = min(filter(self._takes_models, working), key=_crowd, default=None)
        return [self._spot(model_id, shortest, taking) for model_id in model_ids]

    def _takes_models(self, member: Member) -> bool:
        """Whether an engine has not failed to take a model lately."""
        return self._clock() - self._refused.get(member.name, -inf) > AVOIDING

    def _spot(self, model_id: str, shortest: Member, taking: Member | None) -> Spot | None:
        home = self._homes.get(model_id)
        if home is None or (home.lost and home.turn is None):
            return Spot(shortest.name)
        own, elsewhere = (home.member.name, home.member.load), None
        if home.between_steps and not home.lost and taking and self._alike(taking, home):
            elsewhere = taking.name, taking.load
        return find_spot(own, elsewhere, self._moving)

    def take_turn(self, model_id: str, spot: Spot) -> _Turn:
        home = self._homes.get(model_id)
        member = self._members.named(spot.engine)
        if member is None:  # it has left since
            member = min((each for each in self._members if each.trains), key=_crowd)
        if home is None or home.lost:
            home = self._settle(model_id, member)
        return _Turn(home, member, self._clock)

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

    def _alike(self, member: Member, home: _Home) -> bool:
        """Whether an engine computes what a model's home would, and can do so at once."""
        return (
            member.up
            and member.suspects.calm
            and member.engine.catalog.has(home.base_model)
            and _kind(member) == _kind(home.member)
        )

    async def _move(self, home: _Home, member: Member) -> None:
        """Bring a model to another engine; it stays at home if that fails."""
        source, model_id, started = home.member, home.model_id, self._clock()
        try:
            await self._members.enter(source)
            if not self._alike(member, home):
                # It would have to wait for the other engine inside this one, and others may do the opposite.
                _stay(home)
                return
            await self._members.enter(member)
            with self._scratch.new_directory() as directory:
                await source.engine.move_out(model_id, directory)
                lease = await member.engine.restore_snapshot(model_id, home.base_model, directory)
        except EngineDiedError:
            _stay(home)
            raise
        except Exception as error:  # also what torch raises, such as for a lack of memory
            _stay(home)
            self._refused[member.name] = self._clock()
            logger.warning(
                "A model could not move from %s to %s: %s: %s",
                source.name,
                member.name,
                type(error).__name__,
                error,
            )
            return
        if self._homes.get(model_id) is not home:  # it was unloaded meanwhile
            await member.engine.unload_model(model_id)
            return
        source.load.models -= 1
        member.load.models += 1
        home.member, home.lease = member, lease
        self._moving += (self._clock() - started - self._moving) * RECENT
        try:
            await source.engine.unload_model(model_id)
        except Exception as error:  # the model has moved: its request must not fail
            logger.warning("%s could not free a model that has moved: %s", source.name, error)

    # -- models ------------------------------------------------------------------------------

    async def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> EngineLease:
        home = await self._new_home(model_id, base_model)
        lease = await home.member.engine.create_model(model_id, base_model, spec)
        return await self._moved_in(home, lease, between_steps=True)

    async def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> EngineLease:
        home = await self._new_home(model_id, base_model)
        engine = home.member.engine
        lease = await engine.restore_model(model_id, base_model, directory, optimizer=optimizer)
        return await self._moved_in(home, lease, between_steps=True)

    async def restore_snapshot(
        self, model_id: str, base_model: str, directory: Path
    ) -> EngineLease:
        home = await self._new_home(model_id, base_model)
        engine = home.member.engine
        lease = await engine.restore_snapshot(model_id, base_model, directory)
        return await self._moved_in(home, lease, between_steps=False)  # it may have gradients

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
        await self._members.base_model(member, base_model)
        home.base_model = base_model
        return home

    async def _moved_in(self, home: _Home, lease: EngineLease, *, between_steps: bool) -> _Home:
        """Note that a model is on its engine."""
        home.lease, home.between_steps = lease, between_steps
        if self._homes.get(home.model_id) is not home:  # it was unloaded meanwhile
            await home.member.engine.unload_model(home.model_id)
        return home

    async def unload_model(self, model_id: str) -> None:
        home = self._homes.pop(model_id, None)
        if home is not None:
            home.member.load.models -= 1
            await home.member.engine.unload_model(model_id)

    async def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]:
        home = await self._at_home(model_id)
        metrics = await home.member.engine.optim_step(model_id, options)
        home.between_steps = True
        return metrics

    async def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int:
        home = await self._at_home(model_id)
        return await home.member.engine.save_state(model_id, directory, optimizer=optimizer)

    async def snapshot(self, model_id: str, directory: Path) -> int:
        home = await self._loaded(model_id)
        home.snapshots += 1
        try:
            return await home.member.engine.snapshot(model_id, directory)
        finally:
            home.snapshots -= 1

    async def check_traced(self, graph: TracedGraph) -> None:
        member = min(await self._members.some_up(lambda each: each.trains), key=_crowd)
        await self._members.enter(member)
        await member.engine.check_traced(graph)

    async def _at_home(self, model_id: str) -> _Home:
        """The home of a model; the model first moves to the engine on which its turn is."""
        home = await self._loaded(model_id)
        if home.turn is not None and home.turn.member is not home.member:
            if home.snapshots:
                home.turn.move(home.member)
            else:
                await self._move(home, home.turn.member)
            home = await self._loaded(model_id)
        return home

    async def _loaded(self, model_id: str) -> _Home:
        home = self._homes.get(model_id)
        if home is None or home.lease is None:
            raise NotFoundError(f"There is no model {model_id!r:.200}.")
        if home.lost:
            raise EngineDiedError("The engine of this model has died.", cause_known=True)
        await self._members.enter(home.member)
        return home

    # -- passes ------------------------------------------------------------------------------

    async def run_pass(self, model_id: str, request: PassJob) -> PassResult:
        home = await self._at_home(model_id)
        if request.backward:
            home.between_steps = False
        helpers = self._helpers(home, request)
        shares = [] if not helpers else assign(self._shards(home, request), 1 + len(helpers))
        if len(shares) < 2:
            return await home.member.engine.run_pass(model_id, request)
        return await self._run_divided(home, request, shares, helpers)

    def _shards(self, home: _Home, request: PassJob) -> list[Shard]:
        return divide(request.examples, home.member.engine.ready.token_budget)

    def _helpers(self, home: _Home, request: PassJob) -> list[Member]:
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
            and member is not home.member
            and not member.load.in_line
            and self._alike(member, home)
        ]

    async def _run_divided(
        self,
        home: _Home,
        request: PassJob,
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
        working = asyncio.gather(*work, return_exceptions=True)
        try:
            results = await asyncio.shield(working)
        except asyncio.CancelledError:  # the engines go on
            abandoned = asyncio.ensure_future(self._drop_later(working))
            self._abandoned.add(abandoned)
            abandoned.add_done_callback(self._abandoned.discard)
            raise
        failures = [result for result in results if isinstance(result, BaseException)]
        parts = [result for result in results if not isinstance(result, BaseException)]
        finished = False
        try:
            if not failures:
                passed = await engine.finish_pass(model_id, request, parts)
                finished, self._unhelped = True, ""
                return passed
        except ParcelLostError as lost:  # the helper has died since
            failures = [lost]
        finally:
            if not finished:  # else the home has dropped them
                self._drop(parts)
        if isinstance(results[0], BaseException):
            raise results[0]
        for failure in failures:
            # A stuck helper is one that did not help: if the request is the cause, its home gets stuck too.
            if isinstance(failure, EngineDiedError) and not isinstance(failure, EngineStuckError):
                raise failure
        self._tell_unhelped(failures)
        return await engine.run_pass(model_id, request)

    def _tell_unhelped(self, failures: Sequence[BaseException]) -> None:
        """Log why the home computes a whole pass; once, because a full disk stays full for many passes."""
        reasons = {f"{type(failure).__name__}: {failure}" for failure in failures}
        unhelped = "; ".join(sorted(reasons))
        if unhelped != self._unhelped:
            logger.warning(
                "Engines cannot help with large passes for now; each is computed by its home alone: %s",
                unhelped,
            )
        self._unhelped = unhelped

    async def _drop_later(
        self, working: asyncio.Future[list[ShardSums[Parcel] | BaseException]]
    ) -> None:
        """Free what engines send for a pass that was cancelled."""
        results = await working
        self._drop([result for result in results if not isinstance(result, BaseException)])

    def _drop(self, parts: list[ShardSums[Parcel]]) -> None:
        """Free the gradients that helpers have sent and nobody will read."""
        for block in (block for part in parts for block in part.blocks):
            self._depot.drop(block.total)

    async def _help(
        self,
        member: Member,
        home: _Home,
        publishing: asyncio.Future[PublishedAdapter],
        request: PassJob,
        numbers: list[int],
    ) -> ShardSums[Parcel]:
        line, started = member.load.line, self._clock()
        line.join()
        try:
            if not self._alike(member, home):  # since just now; do not wait inside the home
                raise _CannotHelpError(f"{member.name} is started again or in quarantine")
            await self._members.enter(member)
            return await member.engine.help_pass(await publishing, request, numbers)
        finally:
            worked = line.leave(started, self._clock())
            if home.turn is not None:
                home.turn.helped_seconds += worked


class _CannotHelpError(Exception):
    """An engine that should help with a pass cannot do so at once."""


def _stay(home: _Home) -> None:
    """Give a model that does not move a place in the queue of its home."""
    if home.turn is not None:
        home.turn.move(home.member)


def _crowd(member: Member) -> tuple[int, int, str]:
    return member.load.in_line, member.load.models, member.name


def _kind(member: Member) -> tuple[str, str, str, int]:
    facts = member.engine.ready
    return facts.device.partition(":")[0], facts.dtype, facts.kernels, facts.token_budget
