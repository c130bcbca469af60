"""How one sample runs: submitted, polled, and retried independently of the others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from tinkex._retry import Tried
from tinkex._wire.lazy_codecs import json_codec
from tinkex._wire.operations import operation
from tinkex.errors import APITimeoutError, BillingError, RateLimitError, TinkerError
from tinkex.telemetry.bus import emit, wants
from tinkex.telemetry.calls import current_call, current_metadata
from tinkex.telemetry.lazy_events import event_types
from tinkex.types import (
    CancelFutureRequest,
    JoinSamplingSessionRequest,
    SampleResponse,
    UntypedAPIFuture,
)

from .batch_polling import BatchPoller
from .budget import Budget, backoff_after_429, slots
from .polling import Poll
from .queue_state import Observer, QueueWatch
from .retry import RetryConfig, SampleRetryPolicy, ThrottlePolicy
from .session import Session
from .stuck import StuckWatch

__all__ = ["ASAMPLE", "UNLIMITED", "Sample", "SampleNumbers", "SamplerState"]

ASAMPLE: Final = operation("asample")
_HEADERS: Final = {"content-type": "application/json", "x-tinker-sampling-backpressure": "1"}
#: A copy of a client in another process numbers its requests from a multiple of this, so that the numbers do not collide.
_CLONE_STRIDE: Final = 1_000_000_000
UNLIMITED: Final = 1_000_000_000


class SampleNumbers:
    """Numbers the requests of one sampling client. A copy first gets a range that no other copy uses."""

    def __init__(self, session: Session, sampling_session_id: str, *, shadow: bool) -> None:
        self._session = session
        self.sampling_session_id = sampling_session_id
        #: The next numbers; None until `join` was awaited.
        self.counter: itertools.count[int] | None = None if shadow else itertools.count()
        self._joining: asyncio.Lock | None = None

    async def join(self) -> itertools.count[int]:
        self._joining = self._joining or asyncio.Lock()
        async with self._joining:
            if self.counter is None:
                # Not from `random`: workers often set the same seed.
                clone = 1 + secrets.randbelow(_CLONE_STRIDE - 1)
                if self._session.flags.sample_join_sampling_session:
                    request = JoinSamplingSessionRequest(
                        sampling_session_id=self.sampling_session_id
                    )
                    joined = await self._session.call("join_sampling_session", request)
                    clone = joined.client_counter
                self.counter = itertools.count(clone * _CLONE_STRIDE)
        return self.counter


class SamplerState(StuckWatch):
    """What all samples of one client share: retry policies, concurrency limit and batch poller."""

    def __init__(
        self, session: Session, numbers: SampleNumbers, retry_config: RetryConfig | None
    ) -> None:
        flags = session.flags
        asked = retry_config or RetryConfig(max_connections=flags.sample_max_concurrent_requests)
        config = replace(  # the service can switch these off, but not on
            asked,
            enable_retry_logic=asked.enable_retry_logic and not flags.sample_no_retries,
            enable_stuck_detection=asked.enable_stuck_detection
            and flags.sample_enable_stuck_detection,
        )
        super().__init__(session.clock, config)
        self.session, self.numbers = session, numbers
        self.policy = SampleRetryPolicy(config, session.transport.billing_window)
        # Even with retries switched off by the service, clients must slow down after a 429.
        self.throttle = ThrottlePolicy(asked)
        self.room: Budget = slots(config.max_connections or UNLIMITED)
        self.poller = (
            BatchPoller(session, numbers.sampling_session_id)
            if flags.sample_use_retrieve_futures
            else None
        )


@dataclass(slots=True)
class Sample:
    """One sample in flight, and its retry policy.

    Until a promise was read, a retry repeats the same request: if only the answer was lost, the service recognises
    the seq_id and does not draw twice. After that a retry is a new request.
    """

    state: SamplerState
    fields: dict[str, Any]
    weight: int  # approximate size of the request in bytes
    deadline: float | None
    observers: tuple[Observer, ...]
    seq_id: int | None = None  # set while the request has no promise yet
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    started: float = 0.0
    throttled: int = 0

    async def attempt(self, _: int) -> SampleResponse:
        """Submit the sample once and wait for its result."""
        state, watch = self.state, QueueWatch(self.observers)
        if not state.room.try_take(1):
            await state.room.take(1)
        try:
            seq_id = self.seq_id
            if seq_id is None:
                seq_id = next(state.numbers.counter or await state.numbers.join())
                self._number(seq_id)
            if wants(event_types.HttpEvent) and (call := current_call()) is not None:
                call.metadata = {**call.metadata, "seq_id": seq_id}
            promise = await self._post(watch)
            seconds = state.session.clock.monotonic() - self.started
            self.seq_id = None
            if not isinstance(promise, UntypedAPIFuture):
                return cast("SampleResponse", promise)
            return await self._outcome(promise, seconds, seq_id // _CLONE_STRIDE, watch)
        finally:
            state.room.give_back(1)

    def _number(self, seq_id: int) -> None:
        """Build a new request with this number."""
        session = self.state.session
        key = session.transport.new_idempotency_key()
        self.seq_id, self.started = seq_id, session.clock.monotonic()
        self.headers = {**_HEADERS, "x-idempotency-key": key}
        self.body = json_codec.encode({**self.fields, "seq_id": seq_id})

    async def _post(self, watch: QueueWatch) -> Any:
        """Post the sample and return its promise or result. A 429 slows down all samples of the session."""
        session = self.state.session
        transport = session.transport
        url = transport.url(ASAMPLE.path)
        with await session.service.sample_budget.lease(self.weight):
            response = await transport.exchange(
                ASAMPLE, url, self.headers, self.body, deadline=self.deadline
            )
        if response.status < 300:
            return transport.read_promise(ASAMPLE, response)
        error = transport.error(ASAMPLE, url, response)
        if response.status == 429:
            self._slow_down(error, watch)
        raise error

    async def _outcome(
        self, promise: UntypedAPIFuture, seconds: float, clone: int, watch: QueueWatch
    ) -> SampleResponse:
        session, poller, size = self.state.session, self.state.poller, None
        try:
            if poller is not None:
                size = await poller.finished(promise.request_id, clone, self.deadline)
            poll: Poll[SampleResponse] = Poll(
                session.transport,
                ASAMPLE,
                promise,
                session.service.response_room,
                watch,
                self.deadline,
                seconds,
                size,
            )
            return await poll.result()
        except (asyncio.CancelledError, APITimeoutError):  # the caller no longer waits
            if session.dynamic.sample_cancel_enabled and not session.closed:
                session.in_background(_cancel_at_service(session, promise.request_id))
            raise
        finally:
            if poller is not None:
                poller.fetched(promise.request_id, clone)

    # -- retries -----------------------------------------------------------------------------

    def wait_before_retry(self, error: Exception, tried: Tried) -> float | None:
        """A 429 has a separate policy and does not count as an attempt."""
        if isinstance(error, RateLimitError):
            self.throttled += 1
            again = replace(tried, attempt=self.throttled - 1)
            return self.state.throttle.wait_before_retry(error, again)
        again = replace(tried, attempt=tried.attempt - self.throttled)
        return self.state.policy.wait_before_retry(error, again)

    def tell_waiting(self, error: TinkerError, tried: Tried, wait: float) -> None:
        if isinstance(error, RateLimitError):
            return  # `_slow_down` has already notified the user
        limit = f"giving up after {self.state.progress_timeout:.0f} s without progress"
        if isinstance(error, BillingError):
            limit = f"giving up {self.state.policy.billing_window:.0f} s after the first"
        notices = self.state.session.transport.notices
        notices.retry("sample", error, tried.attempt, tried.elapsed, wait, limit)

    def _slow_down(self, error: TinkerError, watch: QueueWatch) -> None:
        watch.see(error.body)
        session, wait = self.state.session, backoff_after_429(self.weight)
        session.service.sample_budget.back_off(wait)
        if wants(event_types.Throttled):
            emit(event_types.Throttled(wait, str(error), metadata=current_metadata()))
        session.transport.notices.paused(
            "sample",
            f"the service asks for fewer concurrent samples; waiting {wait:.0f} s: {error}",
        )


async def _cancel_at_service(session: Session, request_id: str) -> None:
    # If this fails, the service only finishes a sample that nobody reads.
    with contextlib.suppress(TinkerError):
        await session.call("cancel_future", CancelFutureRequest(request_id=request_id))
