"""Traced losses of clients: their graphs are stored until the session ends."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tinkex._wire.operations import Operation
from tinkex.engine.files import make_directory, write_whole
from tinkex.engine.graphs import check_graph
from tinkex.engine.interface import Engines
from tinkex.engine.values import TracedGraph
from tinkex.errors import InvalidInputError
from tinkex.types import CreateCustomLossRequest, CreateCustomLossResponse

from .file_threads import FileThreads
from .futures import Promise, Promises
from .quotas import Quota
from .sessions import Sessions

__all__ = ["Losses"]


class Losses:
    """The traced losses of all sessions."""

    def __init__(
        self,
        directory: Path,
        files: FileThreads,
        sessions: Sessions,
        promises: Promises,
        engine: Engines,
        quota: Quota,
    ) -> None:
        self._directory = directory
        self._quota = quota
        self._of_session: Counter[tuple[str, str]] = Counter()  # by owner and session
        self._files = files
        self._sessions = sessions
        self._promises = promises
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()

    async def create(
        self, row: Operation[object], owner: str, request: CreateCustomLossRequest, body: bytes
    ) -> Promise:
        """Accept a loss; a request with the same number gets the same promise."""
        await self._sessions.check_active(request.session_id, owner)
        check_graph(_graph(request))
        scope = f"{request.session_id}:loss"
        known = self._promises.duplicate(scope, request.custom_loss_seq_id)
        if known is None:
            self._quota.check(owner)
            number = request.custom_loss_seq_id
            known = self._promises.accept(row, owner, scope, number, request, body, "json")
            self.resume(known)
        await self._promises.flushed()
        return known

    def resume(self, promise: Promise) -> None:
        """Start an accepted request: a new one, or one accepted before a restart."""
        self._count(promise.owner, promise.scope.removesuffix(":loss"))
        task = asyncio.ensure_future(self._create(promise))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _create(self, promise: Promise) -> None:
        try:
            request: CreateCustomLossRequest = self._promises.request_of(promise)
            loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
            graph = _graph(request)
            await self._engine.persist(lambda: self._engine.trainer.check_traced(graph))
            await self._files(self._write, loss_id, json.dumps(asdict(graph)))
        except Exception as error:
            self._count(promise.owner, promise.scope.removesuffix(":loss"), -1)
            self._promises.fail(promise, error)
        else:
            self._promises.finish(promise, CreateCustomLossResponse(loss_id=loss_id))

    async def restore(self) -> None:
        """Count the losses of active sessions."""
        names = await self._files(
            lambda: [file.stem for file in self._directory.glob("*:loss:*.json")]
        )
        for name in names:
            session_id = name.partition(":loss:")[0]
            owner = self._sessions.owner(session_id)
            if owner is not None:
                self._count(owner, session_id)

    def _count(self, owner: str, session_id: str, change: int = 1) -> None:
        self._quota.add(owner, change)
        self._of_session[owner, session_id] += change

    async def graph(self, loss_id: object, session_id: str) -> TracedGraph:
        """The graph of a loss, which must belong to this session."""
        # The id is also a file name, so it may consist only of the session id and a number.
        if not (isinstance(loss_id, str) and _is_loss_of(session_id, loss_id)):
            raise InvalidInputError(
                f"there is no loss {loss_id!r:.100} in this session; create one with create_custom_loss",
                field="loss_fn_config.loss_id",
            )
        try:
            content = await self._files(self._place(loss_id).read_text)
        except OSError:
            raise InvalidInputError(
                f"there is no loss {loss_id!r:.100}", field="loss_fn_config.loss_id"
            ) from None
        return TracedGraph(**json.loads(content))

    def _place(self, loss_id: str) -> Path:
        return self._directory / f"{loss_id.replace('/', '_')}.json"

    def _write(self, loss_id: str, content: str) -> None:
        make_directory(self._directory)
        write_whole(self._place(loss_id), content)

    async def close_session(self, session_id: str) -> None:
        def forget() -> None:
            for file in self._directory.glob(f"{session_id}:loss:*.json"):
                file.unlink(missing_ok=True)

        await self._files(forget)
        for owner, session in [key for key in self._of_session if key[1] == session_id]:
            self._quota.release(owner, self._of_session.pop((owner, session)))

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _is_loss_of(session_id: str, loss_id: str) -> bool:
    number = loss_id.removeprefix(f"{session_id}:loss:")
    return number != loss_id and re.fullmatch(r"-?[0-9]{1,20}", number) is not None


def _graph(request: CreateCustomLossRequest) -> TracedGraph:
    # Not `model_dump`: it recurses into arguments that are not checked yet.
    nodes = [
        {
            "op": each.op,
            "name": each.name,
            "target": each.target,
            "args": each.args,
            "kwargs": each.kwargs,
        }
        for each in request.graph.nodes
    ]
    return TracedGraph(request.name, [(item.name, item.rank) for item in request.inputs], nodes)
