"""Sampling on a pool: adapters are immutable and named by a hash of their content; engines open those they need.

A sampler of the service is only a reference to an adapter. Engines know adapters by their content name, so an adapter
can never be served under another's name, and a name is never used again for other weights.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from tinkex.engine import directories
from tinkex.engine.interface import EngineDiedError, EngineLease, OnToken
from tinkex.engine.values import SampledResult, SampleJob
from tinkex.errors import NotFoundError, TinkerError

from .drift import checking_job
from .file_threads import FileThreads
from .kept_open import surplus
from .members import Member, Members
from .pool_trainer import PoolTrainer
from .routing import block_keys, new_tokens, sampling_cost

__all__ = ["PoolSampler"]

logger = logging.getLogger("tinkex.server")


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Frozen weights; `directory` is None for the base model itself."""

    name: str
    base_model: str
    directory: Path | None


@dataclass(eq=False)
class _Opened:
    """An adapter on one engine. It is closed only while it has no users; who opens it is one of them."""

    lease: EngineLease | None = None
    users: int = 0
    size: int = 0  # of its files
    #: Its files, for an engine that may read them again when the sampler it was opened for is gone.
    files: Path | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def ready(self) -> bool:
        return self.lease is not None and not self.lease.lost


class _Reopened:
    """The lease of a sampler. It is never lost: the pool opens the adapter on another engine by itself."""

    lost = False


class PoolSampler:
    """The interface `SamplingEngine` on a pool."""

    def __init__(self, members: Members, trainer: PoolTrainer) -> None:
        self._members = members
        self._trainer = trainer
        self._samplers: dict[str, _Adapter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Of its own: a sample does not wait for copies of checkpoints.
        self._files = FileThreads()
        #: Without engines that have left the pool.
        self._opened: WeakKeyDictionary[Member, OrderedDict[str, _Opened]] = WeakKeyDictionary()

    # -- samplers ----------------------------------------------------------------------------

    async def open_sampler(
        self,
        sampler_id: str,
        base_model: str,
        directory: Path | None,
        *,
        trained_as: str | None = None,
    ) -> EngineLease:
        name = f"base {base_model}"
        if directory is not None:
            name = f"{await self._files(directories.content_name, directory)} {base_model}"
        adapter = _Adapter(name, base_model, directory)
        home = None if trained_as is None else self._trainer.home(trained_as)
        if home is None or not home.samples:
            await self._check_opens(adapter)
        else:
            await self._members.enter(home)
            async with self._using(home, adapter, trained_as):
                pass
        self._samplers[sampler_id] = adapter
        return _Reopened()

    async def _check_opens(self, adapter: _Adapter) -> None:
        """Open an adapter on one engine, so that damaged or unfitting weights are an error now."""
        if adapter.directory is not None and not self._is_open(adapter.name):
            members = await self._members.some_up(self._serving(adapter))
            member = min(members, key=lambda each: (each.load.wait(), each.name))
            await self._members.enter(member)
            async with self._using(member, adapter):
                pass

    def _serving(self, adapter: _Adapter) -> Callable[[Member], bool]:
        plain = SampleJob("", np.zeros(1, np.int64))
        return self._fitting(adapter, plain)

    def _is_open(self, name: str) -> bool:
        return any(name in opened and opened[name].ready for opened in self._opened.values())

    async def close_sampler(self, sampler_id: str) -> None:
        adapter = self._samplers.pop(sampler_id, None)
        if adapter is None or any(each.name == adapter.name for each in self._samplers.values()):
            return
        for member, opened in list(self._opened.items()):
            held = opened.get(adapter.name)
            if held is not None and not held.users:
                await self._close(member, adapter.name)

    # -- sampling ----------------------------------------------------------------------------

    async def sample(self, job: SampleJob, on_token: OnToken | None = None) -> SampledResult:
        adapter = self._samplers.get(job.sampler_id)
        if adapter is None:
            raise NotFoundError(f"There is no sampler {job.sampler_id!r:.200}.")
        keys = block_keys(adapter.name, job.prompt_T)
        member = await self._route(adapter, job, keys)
        cost = new_tokens(job)
        member.load.tokens += cost
        try:
            await self._members.enter(member)
            async with self._using(member, adapter):
                member.load.prefixes.add(keys)
                named = replace(job, sampler_id=adapter.name)
                result = await member.engine.sample(named, on_token)
            if member.draws is not None and member.drift.wants(job, result):
                self._start(self._check(member, adapter, job, result))
            return result
        finally:
            member.load.tokens -= cost
            self._tidy(member)

    def _tidy(self, member: Member) -> None:
        """Close what an engine need not keep open, without the caller, who has what it asked for."""
        if self._to_close(member) is not None:
            self._start(self._close_unused(member))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(
        self, sampler: Member, adapter: _Adapter, job: SampleJob, result: SampledResult
    ) -> None:
        """Compare the logprobs of a result with those of an engine that trains."""
        trainers = [member for member in self._members if member.trains and member.up]
        if not trainers:
            return
        trainer = min(trainers, key=lambda each: (each.load.in_line, each.load.wait(), each.name))
        try:
            async with self._using(trainer, adapter):
                asked = replace(checking_job(job, result), sampler_id=adapter.name)
                checked = await trainer.engine.sample(asked)
            assert checked.prompt_logprobs_T is not None
            sampler.drift.add(result.logprobs[0], checked.prompt_logprobs_T[len(job.prompt_T) :])
        except (EngineDiedError, TinkerError):
            return  # it is only a check
        except Exception as error:
            logger.warning("A sample of %s was not compared: %s", sampler.name, _named(error))
        finally:
            self._tidy(trainer)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._files.close()

    async def _route(self, adapter: _Adapter, job: SampleJob, keys: list[bytes]) -> Member:
        """The engine on which a job costs least: by its load, and by what it has of adapter and prompt."""
        suspected = self._members.quarantine()
        if suspected is not None and suspected.can_draw(job, adapter.base_model):
            return suspected
        members = await self._members.some_up(self._fitting(adapter, job))

        def cost(member: Member) -> tuple[float, str]:
            held = self._held(member).get(adapter.name)
            has_adapter = adapter.directory is None or (held is not None and held.ready)
            return sampling_cost(member.load, job, keys, has_adapter=has_adapter), member.name

        return min(members, key=cost)

    def _fitting(self, adapter: _Adapter, job: SampleJob) -> Callable[[Member], bool]:
        """Prefer engines that sample; an engine that only trains gets the jobs that none of them supports.

        Decided anew at each look: engines join and leave while a request waits.
        """

        def able(member: Member) -> bool:
            return member.can_draw(job, adapter.base_model)

        def fits(member: Member) -> bool:
            if member.samples:
                return able(member)
            return able(member) and not any(each.samples and able(each) for each in self._members)

        return fits

    @asynccontextmanager
    async def _using(
        self, member: Member, adapter: _Adapter, trained_as: str | None = None
    ) -> AsyncIterator[None]:
        """Open an adapter on an engine, unless it is open there, and keep it open inside."""
        of_member = self._held(member)
        opened = of_member.setdefault(adapter.name, _Opened())
        of_member.move_to_end(adapter.name)
        opened.users += 1
        try:
            async with opened.opening:
                if not opened.ready:
                    if opened.lease is not None:  # the engine was restarted: its cache is empty
                        member.load.prefixes.clear()
                    await self._members.base_model(member, adapter.base_model)
                    directory = adapter.directory
                    if directory is not None and member.reads_again:
                        directory = await self._own_files(opened, directory)
                    opened.lease = await member.engine.open_sampler(
                        adapter.name, adapter.base_model, directory, trained_as=trained_as
                    )
                    if adapter.directory is not None:
                        opened.size = await self._files(directories.stored_bytes, adapter.directory)
            yield
        finally:
            opened.users -= 1

    async def _own_files(self, opened: _Opened, directory: Path) -> Path:
        """Files of an adapter that stay while it is open; several samplers share it, and each may be deleted first.

        The name is hidden: a service that starts removes what a killed one has left.
        """
        if opened.files is not None:
            return opened.files
        files = directory.with_name(f".{secrets.token_hex(8)}")
        linking = asyncio.ensure_future(self._files(directories.link, directory, files))
        try:
            await asyncio.shield(linking)
        finally:  # if this is cancelled, the thread goes on, and its files must be known to be removed
            await asyncio.wait([linking])
            if linking.exception() is None:
                opened.files = files
        return files

    async def _close(self, member: Member, name: str) -> None:
        opened = self._held(member).pop(name)
        try:
            await member.engine.close_sampler(name)
        finally:
            if opened.files is not None:
                await self._files.remove(opened.files)

    def _held(self, member: Member) -> OrderedDict[str, _Opened]:
        return self._opened.setdefault(member, OrderedDict())

    async def _close_unused(self, member: Member) -> None:
        while (name := self._to_close(member)) is not None:
            try:
                await self._close(member, name)
            except Exception as error:  # it is closed here; the engine may keep it
                logger.warning("%s could not close an adapter: %s", member.name, _named(error))

    def _to_close(self, member: Member) -> str | None:
        """An adapter that an engine need not keep open; chosen anew for each, because closing takes time."""
        opened = self._held(member)
        needed = {adapter.name for adapter in self._samplers.values()}
        unused = [name for name, held in opened.items() if not held.users]
        beyond = unused[: surplus(held.size for held in opened.values())]
        return next(iter([*beyond, *(name for name in unused if name not in needed)]), None)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
