"""The engines of a pool: which there are, which can work, and waiting until one can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace

from tinkex.engine.base_models import PreparedModel
from tinkex.engine.interface import EngineDiedError, EngineStatus
from tinkex.engine.values import SampleJob

from .drift import Drift
from .routing import Load
from .supervisor import Supervisor
from .suspects import SuspectGroup
from .visits import current_visit

__all__ = ["Member", "Members"]


@dataclass(eq=False)
class Member:
    """One engine of a pool."""

    engine: Supervisor
    trains: bool = True
    samples: bool = True
    #: Which jobs this engine samples exactly as the torch engine would; None for all.
    draws: Callable[[SampleJob], bool] | None = None
    #: Whether it reads the files of an open adapter again, as vLLM does after evicting it from memory.
    reads_again: bool = False
    drift: Drift = field(default_factory=Drift)
    load: Load = field(default_factory=Load)
    suspects: SuspectGroup = field(default_factory=SuspectGroup)
    #: It has left the pool for good.
    gone: bool = False

    def can_draw(self, job: SampleJob, base_model: str) -> bool:
        if self.draws is None:
            return True
        return self.draws(job) and self.engine.catalog.has(base_model)

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def up(self) -> bool:
        return self.engine.up and not self.gone

    @property
    def unwell(self) -> str:
        """Why it cannot serve now; empty if it can."""
        return self.engine.unwell

    @property
    def stranded(self) -> bool:
        """Whether it has left, or died and could not be started again."""
        return self.gone or self.engine.stranded

    def status(self) -> list[EngineStatus]:
        """The engine's own status, with the length of the queue that the pool keeps for it."""
        drift = self.drift
        return [
            replace(
                each,
                in_line=self.load.in_line,
                drift_tokens=drift.tokens,
                drift_sum=drift.total,
                drift_max=drift.worst,
            )
            for each in self.engine.status()
        ]


class Members:
    """All engines of a pool; some may be starting."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def named(self, name: str) -> Member | None:
        return self._members.get(name)

    def add(self, member: Member) -> None:
        self._members[member.name] = member
        self._tell()

    def remove(self, member: Member) -> None:
        member.gone = True
        self._members.pop(member.name, None)
        self._tell()

    def _tell(self) -> None:
        """Wake those that wait for an engine; each change has an event of its own, so that nobody misses it."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def enter(self, member: Member) -> None:
        """Wait until the current work may use an engine, and until the engine is up."""
        visit = current_visit()
        if visit is not None:
            await visit.enter(member)
        while not member.up:
            if member.stranded:
                raise _lost()
            await self._first(member.engine.wait_tried())

    async def base_model(self, member: Member, name: str) -> PreparedModel:
        """Have a base model loaded on an engine; raises if the engine is lost meanwhile, instead of waiting for its return."""
        loading = asyncio.ensure_future(member.engine.catalog.model(name, "base_model"))
        try:
            while not loading.done():
                if member.stranded:
                    raise _lost()
                await self._first(asyncio.wait([loading]), member.engine.wait_stranded())
            return loading.result()
        finally:
            loading.cancel()

    def quarantine(self) -> Member | None:
        """The engine that has to retry the current work, because it died during the last attempt.

        None if it cannot be started, as on a machine that is lost: then another engine retries the work.
        """
        visit = current_visit()
        if visit is None or visit.quarantine is None:
            return None
        member = self._members.get(visit.quarantine)
        return None if member is None or member.stranded else member

    async def some_up(self, fits: Callable[[Member], bool]) -> list[Member]:
        """The engines that can work and fit; waits until there is one."""
        while True:
            fitting = [member for member in self if fits(member)]
            working = [member for member in fitting if member.up]
            if working:
                return working
            await self._first(*(member.engine.wait_up() for member in fitting))

    async def _first(self, *events: Coroutine[object, object, object]) -> None:
        """Wait until one of these is over, or an engine joins or leaves."""
        waiting: list[asyncio.Task[object]] = [asyncio.ensure_future(event) for event in events]
        waiting.append(asyncio.ensure_future(self._changed.wait()))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


def _lost() -> EngineDiedError:
    return EngineDiedError("The engine cannot be started now.", cause_known=True)
