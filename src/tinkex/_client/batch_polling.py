"""One poll for all samples of a sampling session, where the service offers it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tinkex._wire.operations import operation
from tinkex.errors import APIConnectionError, TinkerError
from tinkex.types import (
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)

from .polling import backoff
from .retry import is_transient

if TYPE_CHECKING:
    from .session import Session

__all__ = ["BatchPoller"]

_HOLD: Final = 30.0
#: A 400 that something between client and service said by itself passes; so often in a row it is doubted.
_DOUBTED_400: Final = 3
#: Completions remembered for requests whose promise has not been read yet; far more than are under way.
_MAX_EARLY: Final = 10_000


class BatchPoller:
    """Learns which requests of a sampling session are finished; each waiter then fetches its own result.

    Runs while anybody waits. Copies of a client in other processes have streams of completions of their
    own, so there is one loop for each number a copy counts under.
    """

    def __init__(self, session: Session, sampling_session_id: str) -> None:
        self._session = session
        self._sampling_session_id = sampling_session_id
        self._streams: dict[int, _Stream] = {}

    async def finished(self, request_id: str, clone: int) -> int | None:
        """Wait until the request is finished or failed; the size of its result, if the service tells."""
        stream = self._streams.setdefault(clone, _Stream())
        if request_id in stream.early:
            return stream.early.pop(request_id)
        done: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        stream.waiting[request_id] = done
        if not stream.running:
            stream.running = True
            self._session.in_background(self._run(clone, stream))
        notices = self._session.transport.notices
        waiting = notices.expect("asample", request_id)
        try:
            return await done
        finally:
            notices.end(waiting)
            stream.waiting.pop(request_id, None)

    def fetched(self, request_id: str, clone: int) -> None:
        """Let the service forget a result that nobody will ask for again."""
        if clone in self._streams:
            self._streams[clone].fetched.append(request_id)

    async def _run(self, clone: int, stream: _Stream) -> None:
        try:
            while stream.waiting:
                await self._step(clone, stream)
        except Exception as error:  # nobody else would tell them
            for done in stream.waiting.values():
                if not done.done():
                    done.set_exception(error)
            stream.waiting.clear()
        finally:
            stream.running = False

    async def _step(self, clone: int, stream: _Stream) -> None:
        reported = len(stream.fetched)
        try:
            answer = await self._ask(clone, stream)
        except TinkerError as error:
            await self._after_error(stream, error)
            return
        stream.failures = stream.refusals = 0
        stream.cursor = answer.cursor
        del stream.fetched[:reported]
        for completion in answer.completions:
            size = None
            if isinstance(completion, FutureFinished):
                size = completion.response_payload_uncompressed_size
            stream.complete(completion.request_id, size)

    async def _ask(self, clone: int, stream: _Stream) -> FuturesRetrieveResponse:
        request = FuturesRetrieveRequest(
            target=SamplingSessionFuturesTarget(
                sampling_session_id=self._sampling_session_id, cloned_sampler_id=clone
            ),
            prev_cursor=stream.cursor,
            timeout=_HOLD,
            retrieved_request_ids=list(stream.fetched),
        )
        answer: FuturesRetrieveResponse = await self._session.transport.call(
            operation("retrieve_futures"), request
        )
        return answer

    async def _after_error(self, stream: _Stream, error: TinkerError) -> None:
        if error.status_code == 400 and stream.refusals < _DOUBTED_400:
            stream.refusals += 1
            await self._session.clock.sleep(backoff(0))
            return
        if not is_transient(error):
            raise error
        if error.status_code == 408:
            return  # nothing was finished while the service held the request
        slow = isinstance(error, APIConnectionError) or error.status_code == 429
        wait = backoff(stream.failures) if slow else 0.0
        self._session.transport.notices.retry(
            "retrieve_futures", error, stream.failures, 0.0, wait, "until it answers"
        )
        stream.failures += 1
        await self._session.clock.sleep(wait)


class _Stream:
    """The completions one copy of a client hears of."""

    __slots__ = ("cursor", "early", "failures", "fetched", "refusals", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[int | None]] = {}
        self.early: dict[str, int | None] = {}
        self.fetched: list[str] = []
        self.cursor = 0
        self.failures = 0
        self.refusals = 0
        self.running = False

    def complete(self, request_id: str, size: int | None) -> None:
        done = self.waiting.pop(request_id, None)
        if done is None:  # its promise has not been read yet, or nobody wants it any more
            self.early[request_id] = size
            if len(self.early) > _MAX_EARLY:
                del self.early[next(iter(self.early))]
        elif not done.done():
            done.set_result(size)
