"""A pool whose engines are actors of a Ray cluster: it grows and shrinks with the cluster.

A sampler that is no actor, such as vLLM, runs beside them as a process of the service's machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from tinkex.engine.actors import fits, impossible, lacking
from tinkex.engine.interface import EngineState, EngineStatus
from tinkex.errors import APIStatusError, ConfigError, HTTPResponse

from .members import Member
from .pool import EnginePool
from .ray_cluster import RayCluster

__all__ = ["RayPool"]

logger = logging.getLogger("tinkex.server")

#: Seconds between two looks at the cluster, and until an engine that could not join is tried again.
LOOKING: Final = 1.0
_TRYING: Final = 5.0
#: Seconds until nodes have reported the resources that an engine took, and after which a view is too old to act on.
_REPORTING: Final = 0.5
_OLD: Final = 10.0
#: Seconds after which an engine that found no place leaves a pool of `auto` size.
_LEAVING: Final = 10.0


class RayPool(EnginePool):
    """`count` engines, or with `auto` as many as the cluster has room for; at least one.

    `beside` are members that do not live in the cluster: they start after its engines and never leave.
    """

    def __init__(
        self,
        cluster: RayCluster,
        make: Callable[[str, Mapping[str, float]], Member],
        count: int | Literal["auto"],
        *,
        beside: Sequence[Member] = (),
        on_demand: bool = False,
    ) -> None:
        super().__init__([], cluster, on_demand=on_demand)
        self._beside = beside
        self._cluster = cluster
        self._make = make
        self._count = count
        self._made = 0
        self._need: Mapping[str, float] = {}
        #: Engines that are not members yet.
        self._starting: set[Member] = set()
        self._joining: set[asyncio.Task[None]] = set()
        self._growing: asyncio.Task[None] | None = None
        self._told = ""
        self._not_before = 0.0
        self._settled = 0.0
        self._down_since: dict[Member, float] = {}

    # -- start and stop ----------------------------------------------------------------------

    async def start(self) -> None:
        """Start as many engines as the cluster has room for now; raises if not even one can start."""
        await self._cluster.connect()
        self._exchange.open()
        self._scratch.open()
        self._need = self._resources()
        nodes = self._cluster.nodes
        if impossible(nodes, self._need):
            raise ConfigError(lacking(nodes, self._need) or "", field="engines")
        room = max(1, fits(nodes, self._need))
        wanted = room if self._count == "auto" else min(room, self._count)
        refusals = await self._start_some(wanted)
        if not self._placed:  # the nodes that refused are left out now
            refusals += await self._start_some(1)
        if not self._placed:
            raise refusals[0]
        first = self._placed[0]
        await self._start_beside(first)
        self.catalog.add(first.engine.catalog.models)
        self._growing = asyncio.create_task(self._grow())

    async def _start_some(self, count: int) -> list[BaseException]:
        """Start `count` engines; return the errors of those that do not start."""
        members = [self._new() for _ in range(count)]
        started = await asyncio.gather(
            *(member.engine.start() for member in members), return_exceptions=True
        )
        for member, failure in zip(members, started, strict=True):
            if failure is None:
                self._add(member)
            else:
                logger.warning("%s does not start: %s", member.name, failure)
                await self._give_up(member)
        self._settle()
        return [failure for failure in started if failure is not None]

    @property
    def _placed(self) -> list[Member]:
        """The members that live in the cluster."""
        return [member for member in self._members if member not in self._beside]

    async def _start_beside(self, first: Member) -> None:
        """Start the members of this machine, which has the base models as the bridge found them."""
        for member in self._beside:
            member.engine.know(first.engine.ready.models)
            self._starting.add(member)
            await member.engine.start()
            self._add(member)

    def _settle(self) -> None:
        """Note that engines were placed: an older view of the cluster does not know it."""
        self._settled = asyncio.get_running_loop().time() + _REPORTING

    def _resources(self) -> dict[str, float]:
        """What each engine gets: of the GPUs what was asked or, if the cluster has any, one."""
        options = self._cluster.options
        gpus = options.gpus
        if gpus is None:
            gpus = float(any(node.total.get("GPU", 0.0) >= 1 for node in self._cluster.nodes))
        asked = {"CPU": options.cpus, "GPU": gpus}
        return {kind: amount for kind, amount in asked.items() if amount > 0}

    async def stop(self) -> None:
        for task in [*self._joining, *([] if self._growing is None else [self._growing])]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for member in list(self._starting):
            await self._give_up(member)
        await super().stop()
        await self._cluster.stop()

    def _new(self) -> Member:
        member = self._make(f"engine-{self._made}", self._need)
        self._made += 1
        self._starting.add(member)
        return member

    def _add(self, member: Member) -> None:
        self._starting.discard(member)
        self._members.add(member)

    async def _give_up(self, member: Member) -> None:
        self._starting.discard(member)
        await member.engine.stop()

    # -- growing and shrinking ---------------------------------------------------------------

    async def _grow(self) -> None:
        """Follow the cluster: take new room into use, and let go of engines that found no place."""
        while True:
            await asyncio.sleep(LOOKING)
            try:
                await self._follow()
            except Exception:  # the next look may succeed
                logger.exception("The pool could not follow the cluster; it looks again.")

    async def _follow(self) -> None:
        view = await self._cluster.look()
        now = asyncio.get_running_loop().time()
        if view is None or view.age > _OLD or now - view.age < self._settled:
            return
        room = fits(view.nodes, self._need)
        placed = self._placed
        down = [member for member in placed if not member.up]
        starting = len(self._joining)
        # Engines that start again, and those that are joining, need their room first.
        more = room - len(down) - starting
        if self._count != "auto":
            more = min(more, self._count - len(placed) - starting)
            if len(placed) + starting < self._count and more <= 0:
                self._explain(lacking(view.nodes, self._need))
        elif not room:
            await self._let_go(down)
        if now >= self._not_before:
            for _ in range(max(0, more)):
                task = asyncio.create_task(self._join(self._new()))
                self._joining.add(task)
                task.add_done_callback(self._joining.discard)

    def _explain(self, reason: str | None) -> None:
        """Log once why there are fewer engines than asked for."""
        if reason is not None and reason != self._told:
            self._told = reason
            logger.warning("%d of %d engines run: %s", len(self._placed), self._count, reason)

    async def _join(self, member: Member) -> None:
        try:
            await member.engine.start()
        except Exception as error:
            logger.warning("%s cannot join: %s", member.name, error)
            self._not_before = asyncio.get_running_loop().time() + _TRYING
            await self._give_up(member)
            return
        self._told = ""
        self._settle()
        self._add(member)
        logger.warning("%s has joined on node %s.", member.name, member.engine.ready.node)

    async def _let_go(self, down: list[Member]) -> None:
        now = asyncio.get_running_loop().time()
        self._down_since = {member: self._down_since.get(member, now) for member in down}
        for member, since in list(self._down_since.items()):
            # Ending the one before took time, in which this one may have come back.
            if now - since > _LEAVING and len(self._placed) > 1 and not member.up:
                logger.warning("%s has left: %s", member.name, member.engine.trouble)
                self._members.remove(member)
                del self._down_since[member]
                await member.engine.stop()

    # -- status ------------------------------------------------------------------------------

    def status(self) -> list[EngineStatus]:
        """All engines, also those that were asked for and find no room."""
        found = super().status()
        missing = 0 if self._count == "auto" else self._count - len(self._placed)
        waiting = [
            EngineStatus(
                f"waiting-{number}", starts=0, up=False, busy_seconds=0.0, trouble=self._told
            )
            for number in range(missing)
        ]
        return [*found, *waiting]

    def check_health(self) -> EngineState:
        if not len(self._members):
            raise APIStatusError("The engines are being started.", HTTPResponse(503))
        return super().check_health()
