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

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

import orjson

from tinkex import types
from tinkex._retry import NotYetError, Tried, retrying
from tinkex._wire.failures import failure_from_body
from tinkex._wire.lazy_codecs import json_codec, proto_codec
from tinkex._wire.media_types import PROTOBUF
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
from tinkex.telemetry.lazy_events import event_types

from .budget import Budget
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
    """Waits for one promise, once. Times are those of the transport's clock.

    It is the retry policy of its own polls: `PollPolicy` decides, and is created when the first poll does not bring
    the result.
    """

    transport: Transport
    operation: Operation[R]
    promise: types.UntypedAPIFuture
    room: Budget
    watch: QueueWatch
    deadline: float | None = None
    promise_seconds: float | None = None
    size: int | None = None  # of the result in bytes, if already known
    poll_backoff: PollBackoffOption | None = None  # None: use the configured one

    started: float = 0.0
    polls: int = 0
    held: int | None = None  # bytes of the room that the result takes
    last_error: TinkerError | None = None
    notice: int = 0  # the number of this wait in the notices
    policy: PollPolicy | None = None

    async def result(self) -> R:
        """Poll until the result is there. At the deadline, raise APITimeoutError with the last error as cause."""
        clock, notices = self.transport.clock, self.transport.notices
        self.started = clock.monotonic()
        if wants(event_types.FutureSubmitted):
            self._tell(event_types.FutureSubmitted, self.promise_seconds)
        self.notice = notices.expect(self.operation.name, self.promise.request_id)
        try:
            if self.size is not None:
                await self._hold(self.size)
            result = await retrying(self._poll_once, self, clock, self._tell_waiting)
        except BaseException as error:
            late = self._timeout() if self._ended_by_deadline(error) else None
            if wants(event_types.FutureEvent):
                self._tell_failed(late or error)
            if late is not None:
                raise late from self.last_error
            raise
        finally:
            notices.end(self.notice)
            if self.held is not None:
                self.room.give_back(self.held)
        if wants(event_types.FutureCompleted):
            self._tell(event_types.FutureCompleted, self._elapsed(), self.polls)
        return result

    def wait_before_retry(self, error: Exception, tried: Tried) -> float | None:
        if self.policy is None:
            self.policy = self._policy(tried.elapsed)
        return self.policy.wait_before_retry(error, tried)

    def _policy(self, elapsed: float) -> PollPolicy:
        transport, chosen = self.transport, self.poll_backoff
        if chosen is None:
            chosen = transport.config.poll_backoff
        return PollPolicy(
            transport.billing_window,
            None if self.deadline is None else self._time_left(self.deadline) + elapsed,
            None if chosen in (None, False, "none") else partial(poll_delay, chosen),
        )

    async def _poll_once(self, _: int) -> R:
        """Return the result if it is ready; otherwise raise the answer as an error."""
        try:
            response = await self._ask()
        except APIConnectionError as error:
            if not self._out_of_time():  # otherwise our own deadline cut the poll short
                self.last_error = error
            raise
        if wants(event_types.FuturePolled):
            self._tell(event_types.FuturePolled, self.polls - 1, response.status)
        if response.status != 200:
            raise self._refusal(response)
        if _is_proto(response):
            return self._read_binary(response)
        body = self._parse(response)
        if _is_pending(body):
            raise self._not_finished(body)
        if body.get("status") == "complete_metadata":
            await self._hold(self._announced_size(body, response))
            raise NotFinishedError(first=0.0)  # the work is done; the next poll fetches the result
        return self._read(body, response)

    # -- events ------------------------------------------------------------------------------

    def _tell(self, kind: Callable[..., event_types.FutureEvent], *facts: Any) -> None:
        about = self.promise.request_id, self.operation.request_type or self.operation.name
        tell(partial(kind, *about, *facts, metadata=current_metadata()))

    def _tell_failed(self, error: BaseException) -> None:
        ended = self._elapsed(), self.polls
        if isinstance(error, TinkerError):
            why = error.status_code, error.category.value, type(error).__name__
            self._tell(_failure(error), *ended, *why)
        else:
            self._tell(event_types.FutureCancelled, *ended)

    def _elapsed(self) -> float:
        return self.transport.clock.monotonic() - self.started

    # -- asking ------------------------------------------------------------------------------

    def _ask(self) -> Awaitable[RawResponse]:
        transport, row = self.transport, self.operation
        body = {"request_id": self.promise.request_id, "allow_metadata_only": self.held is None}
        headers = {
            "content-type": "application/json",
            "accept": _ACCEPT_BINARY if row.binary_result else "application/json",
            "x-idempotency-key": transport.new_idempotency_key(),
            "x-tinker-request-type": row.request_type or "",
            "x-tinker-request-iteration": str(self.polls),
            "x-stainless-raw-response": "raw",
        }
        if self.polls == 0 and self.promise_seconds is not None:
            headers["x-tinker-create-promise-roundtrip-time"] = str(self.promise_seconds)
        self.polls += 1
        retrieve, url = _RETRIEVE_IN[row.poll_pool], transport.url(_RETRIEVE.path)
        return transport.exchange(
            retrieve, url, headers, orjson.dumps(body), deadline=self.deadline
        )

    def _out_of_time(self) -> bool:
        return self.deadline is not None and self._time_left(self.deadline) <= 0

    def _time_left(self, deadline: float) -> float:
        return deadline - self.transport.clock.monotonic()

    def _ended_by_deadline(self, error: BaseException) -> bool:
        late = self.policy is not None and self.policy.out_of_time
        return late and isinstance(error, NotYetError | TinkerError)

    def _timeout(self) -> APITimeoutError:
        return APITimeoutError(
            HTTPRequest("POST", _RETRIEVE.path),
            f"{self._name} did not finish before the timeout; it continues on the service"
            + (f". Last error: {self.last_error}" if self.last_error else ""),
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
        if isinstance(result, types.SampleResponse):
            self._name_sequences(result)
        return result

    def _name_sequences(self, result: types.SampleResponse) -> None:
        ids = self.promise.sample_sequence_ids or ()
        for sequence, sequence_id in zip(result.sequences, ids, strict=False):
            sequence.sequence_id = sequence_id

    def _read_binary(self, response: RawResponse) -> R:
        content, kind = response.content, self.operation.result
        read: Any
        try:
            if kind is types.SampleResponse:
                ids = self.promise.sample_sequence_ids
                read = proto_codec.decode_sample_response(content, ids)
            elif kind is types.ForwardBackwardOutput:
                read = proto_codec.decode_forward_backward_output(content)
            else:
                raise DecodeError("protobuf was not expected here", field="body")
        except (DecodeError, InvalidInputError) as error:
            raise self._misunderstood(response, error) from error
        result: R = read
        return result

    def _misunderstood(self, response: RawResponse, error: TinkerError) -> TinkerError:
        complaint = self.transport.misunderstood(self.operation, response, error)
        complaint.request_id = self.promise.request_id
        return complaint

    # -- waiting -----------------------------------------------------------------------------

    async def _hold(self, size: int) -> None:
        """Wait until the room has space for the result."""
        await self.room.take(size)
        self.held = size

    def _announced_size(self, body: dict[str, Any], response: RawResponse) -> int:
        size = body.get("response_payload_size")
        if self.held is not None or not isinstance(size, int) or size < 0:
            raise self._misunderstood(
                response,
                DecodeError(f"unexpected size {size!r:.80}", field="response_payload_size"),
            )
        return size

    def _not_finished(self, body: Mapping[str, Any]) -> NotFinishedError:
        state = self.watch.see(body, self.promise.request_id)
        asked = body.get("retry_after_ms")
        slow = (state is not None and state.paused) or body.get("status") == "pending"
        return NotFinishedError(
            asked=asked / 1000 if isinstance(asked, int | float) and asked >= 0 else None,
            first=FIRST_PAUSED_WAIT if slow else FIRST_WAIT,
        )

    def _refusal(self, response: RawResponse) -> Exception:
        """The error to raise for an answer with an error status."""
        error = self.transport.error(_RETRIEVE, self.transport.url(_RETRIEVE.path), response)
        error.request_id = self.promise.request_id
        if response.status == 408 and isinstance(error.body, Mapping) and _is_pending(error.body):
            return self._not_finished(error.body)
        self.watch.see(error.body, self.promise.request_id)
        self.last_error = error
        return error

    def _tell_waiting(self, error: Exception, tried: Tried, wait: float) -> None:
        """Report why the result is not ready, with the message of the last answer."""
        notices, policy = self.transport.notices, self.policy
        if policy is None or policy.series is Series.NOT_YET or not isinstance(error, TinkerError):
            notices.explain(self.notice, "")
            return
        if policy.series in {Series.BUSY, Series.UNPAID}:
            notices.explain(self.notice, f"its last answer was: {error}")
            if wants(event_types.Throttled):
                emit(event_types.Throttled(wait, str(error), metadata=current_metadata()))
            notices.paused(self._name, f"{error}; asking again in {wait:.1f} s")
            return
        notices.explain(
            self.notice, f"{policy.failed} polls in a row failed, the last with: {error}"
        )
        limit = f"giving up after {GIVE_UP_AFTER / 3600:.0f} h without a useful answer"
        if self.deadline is not None:
            left = self._time_left(self.deadline)
            limit = f"giving up when the call's own timeout ends in {left:.0f} s"
        silent = tried.elapsed - policy.last_useful
        notices.retry(self._name, error, policy.failed - 1, silent, wait, limit)


def _is_pending(body: Mapping[str, Any]) -> bool:
    return str(body.get("type", "")).lower() == "try_again" or body.get("status") == "pending"


def _failure(error: TinkerError) -> type[event_types.FutureFailure]:
    """The event of a failed poll."""
    match error:
        case APITimeoutError():
            return event_types.FutureTimeout
        case APIConnectionError():
            return event_types.FutureConnectionError
        case RequestFailedError():
            return event_types.FutureRequestFailed
        case APIResponseValidationError():
            return event_types.FutureValidationError
        case _:
            return event_types.FutureApiError


# JSON as second choice: services before 0.18.1 support only JSON.
_ACCEPT_BINARY: Final = f"{PROTOBUF}, application/json;q=0.5"


def _is_proto(response: RawResponse) -> bool:
    return PROTOBUF in (response.headers.get("content-type") or "")
