"""Waiting for a promised result with repeated long polls.

| answer                        | action                                                              |
|-------------------------------|---------------------------------------------------------------------|
| 200 protobuf or JSON result   | done                                                                |
| 200 or 408 try_again          | poll again; observers get the queue state                           |
| 200 complete_metadata         | wait until the byte budget has room for the result, then fetch it   |
| 200 {error, category}         | RequestFailedError                                                  |
| any other status, no answer   | poll again or raise, as `poll_policy` decides                       |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

import orjson

from tinkex._retry import NotYetError, Tried, retrying
from tinkex._wire import json_codec, proto_codec
from tinkex._wire.failures import failure_from_body
from tinkex._wire.operations import OPERATIONS, Operation, operation
from tinkex.config import PollBackoffOption, poll_delay
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APITimeoutError,
    DecodeError,
    HTTPRequest,
    InvalidInputError,
    RequestFailedError,
    TinkerError,
)
from tinkex.telemetry.bus import emit, tell, wants
from tinkex.telemetry.calls import current_metadata
from tinkex.telemetry.events import (
    FutureApiError,
    FutureCancelled,
    FutureCompleted,
    FutureConnectionError,
    FutureEvent,
    FutureFailure,
    FuturePolled,
    FutureRequestFailed,
    FutureSubmitted,
    FutureTimeout,
    FutureValidationError,
    Throttled,
)
from tinkex.types import (
    ForwardBackwardOutput,
    QueueState,
    SampleResponse,
    UntypedAPIFuture,
)

from .budget import Budget, Lease
from .poll_policy import (
    FIRST_PAUSED_WAIT,
    FIRST_WAIT,
    GIVE_UP_AFTER,
    NotFinishedError,
    PollPolicy,
    Series,
)
from .queue_state import QueueWatch
from .transport import RawResponse, Transport

__all__ = ["Poll"]

R = TypeVar("R")

_RETRIEVE: Final = operation("retrieve_future")
#: The operation of a poll, by the pool that it uses.
_RETRIEVE_IN: Final = {
    pool: replace(_RETRIEVE, pool=pool) for pool in {row.poll_pool for row in OPERATIONS.values()}
}


@dataclass(slots=True)
class Poll(Generic[R]):
    """Waits for one promise. Times are those of the transport's clock."""

    transport: Transport
    operation: Operation[R]
    promise: UntypedAPIFuture
    room: Budget
    watch: QueueWatch = field(default_factory=QueueWatch)
    deadline: float | None = None
    promise_seconds: float | None = None
    size: int | None = None  # of the result in bytes, if already known
    poll_backoff: PollBackoffOption | None = None  # None: use the configured one

    async def result(self) -> R:
        """Poll until the result is there. At the deadline, raise APITimeoutError with the last error as cause."""
        now = self.transport.clock.monotonic()
        state = _Progress(now)
        if wants(FutureSubmitted):
            self._tell(FutureSubmitted, self.promise_seconds)
        notices = self.transport.notices
        state.notice = notices.expect(self.operation.name, self.promise.request_id)
        try:
            result = await self._result(state)
        except BaseException as error:
            if wants(FutureEvent):
                self._tell_failed(error, state)
            raise
        finally:
            notices.end(state.notice)
        if wants(FutureCompleted):
            self._tell(FutureCompleted, self._elapsed(state), state.iteration)
        return result

    async def _result(self, state: _Progress) -> R:
        with Lease() as lease:
            if self.size is not None:
                state.reserved = True
                await lease.take(self.room, self.size)
            policy = self._policy()
            try:
                return await retrying(
                    lambda _: self._poll_once(lease, state),
                    policy,
                    self.transport.clock,
                    partial(self._tell_waiting, state, policy),
                )
            except (NotYetError, TinkerError):
                if policy.out_of_time:
                    raise self._timeout(state) from state.last_error
                raise

    def _policy(self) -> PollPolicy:
        transport, chosen = self.transport, self.poll_backoff
        if chosen is None:
            chosen = transport.config.poll_backoff
        return PollPolicy(
            transport.billing_window,
            None if self.deadline is None else self.deadline - transport.clock.monotonic(),
            None if chosen in (None, False, "none") else partial(poll_delay, chosen),
        )

    async def _poll_once(self, lease: Lease, state: _Progress) -> R:
        """Return the result if it is ready; otherwise raise the answer as an error."""
        try:
            response = await self._ask(state)
        except APIConnectionError as error:
            if not self._out_of_time():  # otherwise our own deadline cut the poll short
                state.last_error = error
            raise
        if wants(FuturePolled):
            self._tell(FuturePolled, state.iteration - 1, response.status)
        if response.status != 200:
            raise self._refusal(response, state)
        if _is_proto(response):
            return self._read_binary(response)
        body = self._parse(response)
        if _is_pending(body):
            raise self._not_finished(body)
        if body.get("status") == "complete_metadata":
            await self._reserve(body, lease, state, response)
            raise NotFinishedError(first=0.0)  # the work is done; the next poll fetches the result
        return self._read(body, response)

    # -- events ------------------------------------------------------------------------------

    def _tell(self, kind: Callable[..., FutureEvent], *facts: Any) -> None:
        about = self.promise.request_id, self.operation.request_type or self.operation.name
        tell(partial(kind, *about, *facts, metadata=current_metadata()))

    def _tell_failed(self, error: BaseException, state: _Progress) -> None:
        ended = self._elapsed(state), state.iteration
        if isinstance(error, TinkerError):
            why = error.status_code, error.category.value, type(error).__name__
            self._tell(_failure(error), *ended, *why)
        else:
            self._tell(FutureCancelled, *ended)

    def _elapsed(self, state: _Progress) -> float:
        return self.transport.clock.monotonic() - state.started

    # -- asking ------------------------------------------------------------------------------

    async def _ask(self, state: _Progress) -> RawResponse:
        body = orjson.dumps(
            {"request_id": self.promise.request_id, "allow_metadata_only": not state.reserved}
        )
        headers = {
            "content-type": "application/json",
            "accept": _ACCEPT_BINARY if self.operation.binary_result else "application/json",
            "x-idempotency-key": self.transport.new_idempotency_key(),
            "x-tinker-request-type": self.operation.request_type or "",
            "x-tinker-request-iteration": str(state.iteration),
            "x-stainless-raw-response": "raw",
        }
        if state.iteration == 0 and self.promise_seconds is not None:
            headers["x-tinker-create-promise-roundtrip-time"] = str(self.promise_seconds)
        state.iteration += 1
        url = self.transport.url(_RETRIEVE.path)
        row = _RETRIEVE_IN[self.operation.poll_pool]
        return await self.transport.exchange(row, url, headers, body, deadline=self.deadline)

    def _out_of_time(self) -> bool:
        return self.deadline is not None and self.transport.clock.monotonic() >= self.deadline

    def _timeout(self, state: _Progress) -> APITimeoutError:
        return APITimeoutError(
            HTTPRequest("POST", _RETRIEVE.path),
            f"{self._name} did not finish before the timeout; it continues on the service"
            + (f". Last error: {state.last_error}" if state.last_error else ""),
        )

    @property
    def _name(self) -> str:
        return f"{self.operation.name} ({self.promise.request_id})"

    # -- reading answers ---------------------------------------------------------------------

    def _parse(self, response: RawResponse) -> dict[str, Any]:
        try:
            body = json_codec.parse(response.content)
            if not isinstance(body, dict):
                raise DecodeError(f"expected an object, got {body!r:.80}", field="body")
        except DecodeError as error:
            raise self._misunderstood(response, error) from error
        return body

    def _read(self, body: dict[str, Any], response: RawResponse) -> R:
        if body.get("error") is not None or body.get("status") == "failed":
            raise failure_from_body(body, self.promise.request_id)
        if body.get("status") == "completed" and isinstance(body.get("result"), dict):
            body = body["result"]
        try:
            result = json_codec.from_object(body, self.operation.result)
        except DecodeError as error:
            raise self._misunderstood(response, error) from error
        if isinstance(result, SampleResponse):
            self._name_sequences(result)
        return result

    def _name_sequences(self, result: SampleResponse) -> None:
        ids = self.promise.sample_sequence_ids or ()
        for sequence, sequence_id in zip(result.sequences, ids, strict=False):
            sequence.sequence_id = sequence_id

    def _read_binary(self, response: RawResponse) -> R:
        reader = _BINARY_READERS.get(self.operation.result)
        try:
            if reader is None:
                raise DecodeError("protobuf was not expected here", field="body")
            return reader(response.content, self.promise.sample_sequence_ids)  # type: ignore[no-any-return]
        except (DecodeError, InvalidInputError) as error:
            raise self._misunderstood(response, error) from error

    def _misunderstood(self, response: RawResponse, error: TinkerError) -> TinkerError:
        complaint = self.transport.misunderstood(self.operation, response, error)
        complaint.request_id = self.promise.request_id
        return complaint

    # -- waiting -----------------------------------------------------------------------------

    async def _reserve(
        self, body: dict[str, Any], lease: Lease, state: _Progress, response: RawResponse
    ) -> None:
        size = body.get("response_payload_size")
        if state.reserved or not isinstance(size, int) or size < 0:
            raise self._misunderstood(
                response,
                DecodeError(f"unexpected size {size!r:.80}", field="response_payload_size"),
            )
        state.reserved = True
        await lease.take(self.room, size)

    def _not_finished(self, body: Mapping[str, Any]) -> NotFinishedError:
        state = self.watch.see(body, self.promise.request_id)
        asked = body.get("retry_after_ms")
        slow = state in _PAUSED or body.get("status") == "pending"
        return NotFinishedError(
            asked=asked / 1000 if isinstance(asked, int | float) and asked >= 0 else None,
            first=FIRST_PAUSED_WAIT if slow else FIRST_WAIT,
        )

    def _refusal(self, response: RawResponse, state: _Progress) -> Exception:
        """The error to raise for an answer with an error status."""
        error = self.transport.error(_RETRIEVE, self.transport.url(_RETRIEVE.path), response)
        error.request_id = self.promise.request_id
        if response.status == 408 and isinstance(error.body, Mapping) and _is_pending(error.body):
            return self._not_finished(error.body)
        self.watch.see(error.body, self.promise.request_id)
        state.last_error = error
        return error

    def _tell_waiting(
        self, state: _Progress, policy: PollPolicy, error: Any, tried: Tried, wait: float
    ) -> None:
        """Report why the result is not ready, with the message of the last answer."""
        notices = self.transport.notices
        if policy.series is Series.NOT_YET:
            notices.explain(state.notice, "")
            return
        if policy.series in {Series.BUSY, Series.UNPAID}:
            notices.explain(state.notice, f"its last answer was: {error}")
            if wants(Throttled):
                emit(Throttled(wait, str(error), metadata=current_metadata()))
            notices.paused(self._name, f"{error}; asking again in {wait:.1f} s")
            return
        notices.explain(
            state.notice, f"{policy.failed} polls in a row failed, the last with: {error}"
        )
        limit = f"giving up after {GIVE_UP_AFTER / 3600:.0f} h without a useful answer"
        if self.deadline is not None:
            left = self.deadline - self.transport.clock.monotonic()
            limit = f"giving up when the call's own timeout ends in {left:.0f} s"
        silent = tried.elapsed - policy.last_useful
        notices.retry(self._name, error, policy.failed - 1, silent, wait, limit)


@dataclass(slots=True)
class _Progress:
    """State of one poll loop."""

    started: float
    iteration: int = 0
    reserved: bool = False
    last_error: TinkerError | None = None
    notice: int = 0


def _is_pending(body: Mapping[str, Any]) -> bool:
    return str(body.get("type", "")).lower() == "try_again" or body.get("status") == "pending"


def _failure(error: TinkerError) -> type[FutureFailure]:
    for kind, event in _FAILURES:
        if isinstance(error, kind):
            return event
    return FutureApiError


#: The event of a failed poll, by error class; the first match wins.
_FAILURES: Final[tuple[tuple[type[TinkerError], type[FutureFailure]], ...]] = (
    (APITimeoutError, FutureTimeout),
    (APIConnectionError, FutureConnectionError),
    (RequestFailedError, FutureRequestFailed),
    (APIResponseValidationError, FutureValidationError),
)
_PAUSED: Final = {QueueState.PAUSED_RATE_LIMIT, QueueState.PAUSED_CAPACITY}
# JSON as second choice: services before 0.18.1 support only JSON.
_ACCEPT_BINARY: Final = f"{proto_codec.CONTENT_TYPE}, application/json;q=0.5"


def _is_proto(response: RawResponse) -> bool:
    return proto_codec.CONTENT_TYPE in (response.headers.get("content-type") or "")


def _forward_backward_output(data: bytes, _: Sequence[str] | None) -> ForwardBackwardOutput:
    return proto_codec.decode_forward_backward_output(data)


_BINARY_READERS: Final[dict[Any, Callable[[bytes, Sequence[str] | None], Any]]] = {
    ForwardBackwardOutput: _forward_backward_output,
    SampleResponse: proto_codec.decode_sample_response,
}
