"""One poll for all samples of a sampling session, where the service offers it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tinkex._wire.operations import operation
from tinkex.errors import APIConnectionError, TinkerError
from tinkex.types import (
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)

from .retry import is_transient

if TYPE_CHECKING:
    from .session import Session

__all__ = ["BatchPoller"]

_HOLD: Final = 30.0
_MAX_BACKOFF: Final = 30.0


class BatchPoller:
    """Learns which requests of a sampling session are finished; each waiter then fetches its own result.

    Runs while anybody waits. Copies of a client in other processes have streams of completions of their
    own, so there is one loop for each number a copy counts under.
    """

    def __init__(self, session: Session, sampling_session_id: str) -> None:
        self._session = session
        self._sampling_session_id = sampling_session_id
        self._waiting: dict[int, dict[str, asyncio.Future[None]]] = {}
        self._early: dict[int, set[str]] = {}
        self._cursor: dict[int, int] = {}
        self._fetched: dict[int, list[str]] = {}

    async def finished(self, request_id: str, clone: int) -> None:
        """Wait until the request is finished or failed."""
        if request_id in self._early.get(clone, ()):
            self._early[clone].discard(request_id)
            return
        waiting = self._waiting.setdefault(clone, {})
        done = waiting[request_id] = asyncio.get_running_loop().create_future()
        if len(waiting) == 1:
            self._session.in_background(self._run(clone))
        try:
            await done
        finally:
            waiting.pop(request_id, None)
            self._fetched.setdefault(clone, []).append(request_id)

    async def _run(self, clone: int) -> None:
        waiting = self._waiting[clone]
        failures = 0
        while waiting:
            try:
                answer = await self._ask(clone)
            except TinkerError as error:
                if not is_transient(error):
                    self._fail(clone, error)
                    return
                failures += 1
                self._session.transport.notices.retry(
                    "retrieve_futures",
                    error,
                    failures - 1,
                    0.0,
                    2.0 ** min(failures, 5),
                    "until it answers",
                )
                if isinstance(error, APIConnectionError) or error.status_code == 429:
                    wait = min(2.0 ** (failures - 1), _MAX_BACKOFF)
                    await self._session.clock.sleep(wait)
                continue
            failures = 0
            self._cursor[clone] = answer.cursor
            for completion in answer.completions:
                self._complete(clone, completion.request_id)

    async def _ask(self, clone: int) -> FuturesRetrieveResponse:
        request = FuturesRetrieveRequest(
            target=SamplingSessionFuturesTarget(
                sampling_session_id=self._sampling_session_id, cloned_sampler_id=clone
            ),
            prev_cursor=self._cursor.get(clone, 0),
            timeout=_HOLD,
            retrieved_request_ids=self._fetched.pop(clone, []),
        )
        answer: FuturesRetrieveResponse = await self._session.transport.call(
            operation("retrieve_futures"), request
        )
        return answer

    def _complete(self, clone: int, request_id: str) -> None:
        done = self._waiting[clone].get(request_id)
        if done is None:  # its promise has not been read yet
            self._early.setdefault(clone, set()).add(request_id)
        elif not done.done():
            done.set_result(None)

    def _fail(self, clone: int, error: TinkerError) -> None:
        for done in self._waiting[clone].values():
            if not done.done():
                done.set_exception(error)
