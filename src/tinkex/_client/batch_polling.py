"""One poll for all samples of a sampling session, if the service supports it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from tinkex._retry import Tried, retrying
from tinkex._wire.operations import operation
from tinkex.errors import APITimeoutError, TinkerError
from tinkex.types import (
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)

from .poll_policy import GIVE_UP_AFTER, NotFinishedError, PollPolicy, Series

if TYPE_CHECKING:
    from .session import Session

__all__ = ["BatchPoller"]

#: Seconds for which the service may hold one poll.
_HOLD: Final = 30.0
#: Cap on completions kept for requests whose promise is not read yet. Far more than are ever in flight.
_MAX_EARLY: Final = 10_000


class BatchPoller:
    """Learns which requests of a sampling session are finished; each waiter then fetches its own result.

    The loop runs while at least one request waits. Copies of a client in other processes have separate streams of
    completions, so there is one loop per clone number.
    """

    def __init__(self, session: Session, sampling_session_id: str) -> None:
        self._session = session
        self._sampling_session_id = sampling_session_id
        self._streams: dict[int, _Stream] = {}

    async def finished(
        self, request_id: str, clone: int, deadline: float | None = None
    ) -> int | None:
        """Wait until the request has finished or failed. Returns the size of its result in bytes, if the service says it."""
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
            if deadline is None:
                return await done
            async with self._session.clock.timeout(deadline - self._session.clock.monotonic()):
                return await done
        except TimeoutError as error:
            raise APITimeoutError(
                message=f"asample ({request_id}) did not finish before the timeout; it continues on the service"
                + (f". Last error: {stream.last_error}" if stream.last_error else "")
            ) from (stream.last_error or error)
        finally:
            notices.end(waiting)
            stream.waiting.pop(request_id, None)

    def fetched(self, request_id: str, clone: int) -> None:
        """Note that the result is fetched; the next poll tells the service that it may delete it."""
        if clone in self._streams:
            self._streams[clone].fetched.append(request_id)

    async def _run(self, clone: int, stream: _Stream) -> None:
        transport = self._session.transport
        try:
            while stream.waiting:
                policy = PollPolicy(transport.billing_window)
                await retrying(
                    lambda _: self._poll_once(clone, stream),
                    policy,
                    self._session.clock,
                    partial(self._tell_waiting, policy),
                )
        except Exception as error:  # otherwise the waiters would never learn of it
            for done in stream.waiting.values():
                if not done.done():
                    done.set_exception(error)
            stream.waiting.clear()
        finally:
            stream.running = False

    async def _poll_once(self, clone: int, stream: _Stream) -> None:
        """Record finished requests. Raises NotFinishedError if none of them has a waiter."""
        if not stream.waiting:  # all waiters were cancelled during the wait
            return
        reported = len(stream.fetched)
        try:
            answer = await self._ask(clone, stream)
        except TinkerError as error:
            stream.last_error = error
            raise
        stream.cursor = answer.cursor
        del stream.fetched[:reported]
        released = 0
        for completion in answer.completions:
            size = None
            if isinstance(completion, FutureFinished):
                size = completion.response_payload_uncompressed_size
            released += stream.complete(completion.request_id, size)
        if not released:
            raise NotFinishedError

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

    def _tell_waiting(
        self, policy: PollPolicy, error: TinkerError, tried: Tried, wait: float
    ) -> None:
        if policy.series is not Series.NOT_YET:
            limit = f"giving up after {GIVE_UP_AFTER / 3600:.0f} h without a useful answer"
            silent = tried.elapsed - policy.last_useful
            self._session.transport.notices.retry(
                "retrieve_futures", error, policy.failed - 1, silent, wait, limit
            )


class _Stream:
    """The stream of completions of one copy of a client."""

    __slots__ = ("cursor", "early", "fetched", "last_error", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[int | None]] = {}
        self.early: dict[str, int | None] = {}
        self.fetched: list[str] = []
        self.cursor = 0
        self.last_error: TinkerError | None = None
        self.running = False

    def complete(self, request_id: str, size: int | None) -> bool:
        """Hand a completion to its waiter. Returns whether there was one."""
        done = self.waiting.pop(request_id, None)
        if done is None:  # its promise is not read yet, or its waiter is gone
            self.early[request_id] = size
            if len(self.early) > _MAX_EARLY:
                del self.early[next(iter(self.early))]
        elif not done.done():
            done.set_result(size)
        return done is not None
