"""Supervises one engine process: starts it, watches it, and restarts it when it dies.

This is the interface of `tinkex.engine.interface`, implemented by one process of this machine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from tinkex.engine import calls
from tinkex.engine.base_models import PreparedModel
from tinkex.engine.catalog import Catalog
from tinkex.engine.interface import (
    HOME,
    IN_LINE,
    EngineDiedError,
    EngineState,
    EngineStatus,
    OnToken,
    Spot,
)
from tinkex.engine.parcels import Parcel, PublishedAdapter
from tinkex.engine.process import Ready
from tinkex.engine.shards import ShardSums
from tinkex.engine.values import (
    AdamStep,
    LoraSpec,
    PassJob,
    PassResult,
    SampledResult,
    SampleJob,
    TracedGraph,
)
from tinkex.errors import APIStatusError, HTTPResponse, TinkerError

from .routing import Line
from .suspects import SuspectGroup
from .worker import Worker

__all__ = ["Supervisor"]

T = TypeVar("T")
logger = logging.getLogger("tinkex.server")

#: Seconds after which an engine that is started again counts as stranded at the latest.
_LONGEST_PATIENCE: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Lease:
    """Something that was loaded in one life of the engine."""

    worker: Worker
    life: int

    @property
    def lost(self) -> bool:
        return self.worker.life != self.life


class _Turn:
    def __init__(self, line: Line) -> None:
        self._line, self._joined_at = line, time.monotonic()
        line.join()

    def end(self) -> float:
        return self._line.leave(self._joined_at, time.monotonic())


class Supervisor:
    """One engine that survives the death of its process; it trains and samples."""

    def __init__(
        self,
        worker: Worker,
        *,
        on_demand: bool = False,
        longest_pause: float = 60.0,
        patience: float = 10.0,
    ) -> None:
        self._worker = worker
        #: Seconds that starting it again may take until it counts as stranded, at least: others then do its work.
        self._patience = patience
        self._starts = 0
        #: Seconds between two attempts to start it grow up to this.
        self._longest_pause = longest_pause
        #: Why it could not be started the last time: for clients, and as the log has it.
        self.trouble = ""
        self._logged = ""
        self.stopping = False
        self.catalog = Catalog(self._add_base_model, on_demand=on_demand)
        self._line = Line()
        self._drawing = 0
        self._alive = asyncio.Event()
        #: Whether it was started, or could not be, since it died.
        self._tried = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._suspects = SuspectGroup()
        self._models: dict[str, _Lease] = {}
        self._samplers: dict[str, _Lease] = {}

    @property
    def trainer(self) -> Supervisor:
        return self

    @property
    def sampler(self) -> Supervisor:
        return self

    # -- start and stop ----------------------------------------------------------------------

    async def start(self) -> None:
        began = time.monotonic()
        self.catalog.add((await self._worker.start()).models)
        self._starts += 1
        # The first start may have downloaded a model; the next one will not.
        took = time.monotonic() - began
        self._patience = max(self._patience, min(2 * took, _LONGEST_PATIENCE))
        self._alive.set()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        self.stopping = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._worker.stop()

    async def _watch(self) -> None:
        while True:
            await self._worker.died.wait()
            self._alive.clear()
            self._tried.clear()
            self._worker.life += 1
            await self._start_again()
            self.trouble = ""
            self._alive.set()
            self._tried.set()

    async def _start_again(self) -> None:
        """Start the engine after it died, as often as that takes."""
        pause, told = 1.0, False
        while True:
            late = asyncio.get_running_loop().call_later(self._patience, self._strand)
            try:
                await self._worker.stop()
                if not told:
                    logger.error("%s %s; starting it again.", self.name, self._worker.ending)
                    told = True
                await self._worker.start()
            except Exception as error:
                late.cancel()
                self._tell(error, pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, self._longest_pause)
            else:
                self._starts += 1
                return
            finally:
                late.cancel()

    def _strand(self) -> None:
        """Let other engines do the work of one that takes long to start."""
        if not self.trouble:
            self.trouble = f"{self.name} was not up {self._patience:.0f} seconds after its end."
            logger.warning("%s Engines that are up, if any, do its work meanwhile.", self.trouble)
        self._tried.set()

    def _tell(self, error: Exception, pause: float) -> None:
        """Log why the engine does not start; what an engine or the system answers needs no traceback."""
        known = isinstance(error, TinkerError | OSError | RuntimeError)
        if not known or str(error) != self._logged:
            logger.error(
                "%s does not start; trying again in %.0f s: %s",
                self.name,
                pause,
                error,
                exc_info=None if known else error,
            )
        self._logged = str(error)
        written_for_clients = isinstance(error, TinkerError | EngineDiedError)
        self.trouble = (
            self._logged
            if written_for_clients
            else f"It does not start ({type(error).__name__}); the service's log says why."
        )
        self._tried.set()

    @property
    def unwell(self) -> str:
        """Why the engine cannot serve now: it is down, or was silent for half of its deadline. Empty if it can."""
        if not self.up:
            return f"{self.name} is being started." + (f" {self.trouble}" if self.trouble else "")
        silent, deadline = self._worker.watch.silent, self._worker.watch.deadline
        if silent > deadline / 2:
            return (
                f"{self.name} has made no progress for {silent:.0f} seconds; "
                f"it is killed after {deadline:.0f} (the setting engine_deadline)."
            )
        return ""

    def check_health(self) -> EngineState:
        """The state of the engine; raises a 503 if it cannot serve now."""
        if why := self.unwell:
            raise APIStatusError(f"No engine can serve: {why}", HTTPResponse(503))
        return "working" if self._worker.busy else "idle"

    @property
    def name(self) -> str:
        return self._worker.name

    def know(self, models: Sequence[PreparedModel]) -> None:
        """Base models that another engine has prepared on disk; call it before `start`."""
        self._worker.also_prepared(models)

    @property
    def up(self) -> bool:
        """Whether the engine runs, as far as is known."""
        return self._alive.is_set() and not self._worker.died.is_set()

    async def wait_up(self) -> None:
        if self._worker.died.is_set():  # `_watch` may not have run yet
            self._alive.clear()
        await self._alive.wait()

    @property
    def stranded(self) -> bool:
        """Whether it has died and could not be started again so far."""
        return bool(self.trouble) and not self.up

    async def wait_tried(self) -> None:
        """Wait until an engine that has died is up again, or could not be started."""
        if self._worker.died.is_set() and not self.trouble:  # `_watch` may not have run yet
            self._tried.clear()
        await self._tried.wait()

    async def wait_stranded(self) -> None:
        """Wait until the engine has died and could not be started again."""
        while not self.stranded:
            await self._worker.died.wait()
            await self.wait_tried()

    @property
    def ready(self) -> Ready:
        assert self._worker.ready is not None
        return self._worker.ready

    @property
    def starting(self) -> bool:
        """Whether it was never up."""
        return self._worker.ready is None

    def status(self) -> list[EngineStatus]:
        worker, ready = self._worker, self._worker.ready
        return [
            EngineStatus(
                worker.name,
                starts=self._starts,
                up=self.up,
                busy_seconds=worker.busy_seconds,
                pid=worker.pid,
                node="" if ready is None else ready.node,
                memory=worker.memory,
                trouble=self.unwell if self.up else self.trouble,
                kind=worker.kind,
                device="" if ready is None else ready.device,
                base_models=tuple(model.name for model in self.catalog.models),
                models=sum(not lease.lost for lease in self._models.values()),
                in_line=self._line.length,
                samples=self._drawing,
            )
        ]

    # -- retries -----------------------------------------------------------------------------

    async def persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, which calls the engine; retry it if the engine dies, until it is found to be the cause."""
        return await self._suspects.run(lambda: self._attempt(work))

    async def _attempt(self, work: Callable[[], Awaitable[T]]) -> T:
        await self.wait_up()
        try:
            return await work()
        except EngineDiedError:
            if self.stopping:
                raise asyncio.CancelledError from None
            raise

    async def _add_base_model(self, name: str) -> PreparedModel:
        # A separate suspect group: a caller waiting for this load may itself hold a slot in the main one.
        load = calls.AddBaseModel(name)
        model = await SuspectGroup().run(lambda: self._attempt(lambda: self._worker.call(load)))
        self._worker.also_serve(name)
        return model

    # -- training ----------------------------------------------------------------------------

    def spots(self, model_ids: Sequence[str]) -> list[Spot | None]:
        return [HOME if self._line.length < IN_LINE else None] * len(model_ids)

    def take_turn(self, model_id: str, spot: Spot) -> _Turn:
        return _Turn(self._line)

    async def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> _Lease:
        return await self._load_model(model_id, calls.CreateModel(model_id, base_model, spec))

    async def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> _Lease:
        call = calls.RestoreModel(model_id, base_model, directory, optimizer)
        return await self._load_model(model_id, call)

    async def restore_snapshot(self, model_id: str, base_model: str, directory: Path) -> _Lease:
        call = calls.RestoreSnapshot(model_id, base_model, directory)
        return await self._load_model(model_id, call)

    async def _load_model(self, model_id: str, call: calls.EngineCall[None]) -> _Lease:
        lease = self._lease()
        await self._worker.call(call)
        self._models[model_id] = lease
        return lease

    async def unload_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)
        with suppress(EngineDiedError):  # its death has freed everything
            await self._worker.call(calls.UnloadModel(model_id))
        self._models.pop(model_id, None)  # a call that loads it may have been in flight

    async def run_pass(self, model_id: str, request: PassJob) -> PassResult:
        self._check_held(self._models.get(model_id))
        return await self._worker.call(calls.RunPass(model_id, request))

    async def publish(self, model_id: str) -> PublishedAdapter:
        self._check_held(self._models.get(model_id))
        return await self._worker.call(calls.Publish(model_id))

    async def run_shards(
        self, model_id: str, request: PassJob, numbers: Sequence[int]
    ) -> ShardSums[Parcel]:
        self._check_held(self._models.get(model_id))
        return await self._worker.call(calls.RunShards(model_id, request, numbers))

    async def help_pass(
        self, adapter: PublishedAdapter, request: PassJob, numbers: Sequence[int]
    ) -> ShardSums[Parcel]:
        return await self._worker.call(calls.HelpPass(adapter, request, numbers))

    async def finish_pass(
        self, model_id: str, request: PassJob, parts: Sequence[ShardSums[Parcel]]
    ) -> PassResult:
        self._check_held(self._models.get(model_id))
        return await self._worker.call(calls.FinishPass(model_id, request, parts))

    async def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]:
        self._check_held(self._models.get(model_id))
        return await self._worker.call(calls.OptimStep(model_id, options))

    async def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int:
        self._check_held(self._models.get(model_id))
        return await self._worker.call(calls.SaveState(model_id, directory, optimizer))

    async def snapshot(self, model_id: str, directory: Path) -> int:
        self._check_held(self._models.get(model_id))
        return await self._worker.call(calls.TakeSnapshot(model_id, directory))

    async def move_out(self, model_id: str, directory: Path) -> None:
        """Write a model that has no call in flight, without waiting for the engine's queue."""
        self._check_held(self._models.get(model_id))
        await self._worker.call(calls.MoveOut(model_id, directory))

    async def check_traced(self, graph: TracedGraph) -> None:
        await self._worker.call(calls.CheckTraced(graph))

    # -- sampling ----------------------------------------------------------------------------

    async def open_sampler(
        self,
        sampler_id: str,
        base_model: str,
        directory: Path | None,
        *,
        trained_as: str | None = None,
    ) -> _Lease:
        trained = self._models.get(trained_as or "")
        model_id = None if trained is None or trained.lost else trained_as
        lease = self._lease()
        await self._worker.call(calls.OpenSampler(sampler_id, base_model, model_id, directory))
        self._samplers[sampler_id] = lease
        return lease

    async def close_sampler(self, sampler_id: str) -> None:
        self._samplers.pop(sampler_id, None)
        with suppress(EngineDiedError):
            await self._worker.call(calls.CloseSampler(sampler_id))

    async def sample(self, job: SampleJob, on_token: OnToken | None = None) -> SampledResult:
        self._check_held(self._samplers.get(job.sampler_id))
        self._drawing += 1
        try:
            return await self._worker.sample(job, on_token)
        finally:
            self._drawing -= 1

    # -- leases ------------------------------------------------------------------------------

    def _lease(self) -> _Lease:
        """A lease of what the next call loads: an engine that is started again later does not have it."""
        return _Lease(self._worker, self._worker.life)

    def _check_held(self, lease: _Lease | None) -> None:
        if lease is not None and lease.lost:
            worker = self._worker
            raise EngineDiedError(
                "The engine was restarted and has lost what it had loaded.",
                engine=worker.name,
                life=worker.life,
                cause_known=True,
            )
