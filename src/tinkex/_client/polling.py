"""Waiting for a promised result: one long poll after another until it is there.

| answer                        | what happens                                                        |
|-------------------------------|---------------------------------------------------------------------|
| 200 protobuf or JSON result   | done                                                                |
| 200 try_again, 408            | poll again; the queue state goes to the observers                   |
| 200 complete_metadata         | wait for room for that many bytes, then fetch it                    |
| 200 {error, category}         | RequestFailedError                                                  |
| 409, 410                      | five times more within 15 s, then ConflictError or GoneError        |
| 5xx                           | poll again at once, or after `poll_backoff`                         |
| 429, no answer                | poll again after 1, 2, 4 … 30 s                                     |
| 402                           | poll again every 5 s for as long as the service allows              |
| 400                           | three times more within 3 s, then BadRequestError                   |
| other 4xx                     | the error it stands for                                             |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

import orjson

from tinkex._wire import json_codec, proto_codec
from tinkex._wire.failures import failure_from_body
from tinkex._wire.operations import Operation, Pool, operation
from tinkex.config import PollBackoff, PollBackoffOption, poll_delay
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
from .queue_state import QueueWatch
from .retry import BILLING_WAIT
from .transport import RawResponse, Transport

__all__ = ["Poll", "backoff"]

R = TypeVar("R")

_RETRIEVE: Final = operation("retrieve_future")
#: Thousands of samples may be waited for at once; a training step must not wait behind them.
_RETRIEVE_SAMPLE: Final = replace(_RETRIEVE, pool=Pool.SAMPLE_FUTURES)
_MAX_BACKOFF: Final = 30.0
_PAUSED_WAIT: Final = 1.0
#: Answers that would end a training run are believed only when they are repeated: something between client and
#: service may have said them. How often they are doubted in a row.
_DOUBTED: Final = {400: 3, 409: 5, 410: 5}
#: A service that has not answered for so long is taken to be gone for good …
UNREACHABLE_LIMIT: Final = 7200.0
#: … if it was asked at least so often: a process that was stopped, or a machine that slept, has not been asking.
_UNREACHABLE_POLLS: Final = 10


def backoff(attempt: int) -> float:
    """1, 2, 4 … 30 seconds."""
    return min(2.0 ** min(attempt, 10), _MAX_BACKOFF)


@dataclass(slots=True)
class Poll(Generic[R]):
    """One promise and how to wait for it; times are the transport clock's."""

    transport: Transport
    operation: Operation[R]
    promise: UntypedAPIFuture
    room: Budget
    watch: QueueWatch = field(default_factory=QueueWatch)
    deadline: float | None = None
    promise_seconds: float | None = None
    size: int | None = None  # of the result in bytes, if the service has told already
    poll_backoff: PollBackoffOption | None = None  # None for the configuration's

    async def result(self) -> R:
        """Poll until the result is there; gives up at the deadline with the last error seen."""
        now = self.transport.clock.monotonic()
        state = _Progress(now, now)
        if wants(FutureSubmitted):
            self._tell(FutureSubmitted, self.promise_seconds)
        waiting = self.transport.notices.expect(self.operation.name, self.promise.request_id)
        try:
            result = await self._result(state)
        except BaseException as error:
            if wants(FutureEvent):
                self._tell_failed(error, state)
            raise
        finally:
            self.transport.notices.end(waiting)
        if wants(FutureCompleted):
            self._tell(FutureCompleted, self._elapsed(state), state.iteration)
        return result

    async def _result(self, state: _Progress) -> R:
        with Lease() as lease:
            if self.size is not None:
                state.reserved = True
                await lease.take(self.room, self.size)
            while True:
                self._check_deadline(state)
                try:
                    response = await self._ask(state)
                except APIConnectionError as error:
                    await self._after_silence(state, error)
                    continue
                state.heard(self.transport.clock.monotonic(), response.status)
                if wants(FuturePolled):
                    self._tell(FuturePolled, state.iteration - 1, response.status)
                if response.status != 200:
                    await self._after_error(state, response)
                    continue
                if _is_proto(response):
                    return self._read_binary(response)
                body = self._parse(response)
                if self._is_pending(body):
                    await self._after_pending(body)
                elif body.get("status") == "complete_metadata":
                    await self._reserve(body, lease, state, response)
                else:
                    return self._read(body, response)

    # -- telling -----------------------------------------------------------------------------

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
        row = _RETRIEVE_SAMPLE if self.operation.pool is Pool.SAMPLING else _RETRIEVE
        return await self.transport.exchange(row, url, headers, body, deadline=self.deadline)

    def _check_deadline(self, state: _Progress) -> None:
        if self.deadline is None or self.transport.clock.monotonic() < self.deadline:
            return
        raise APITimeoutError(
            HTTPRequest("POST", _RETRIEVE.path),
            f"{self._name} was not finished in time; it goes on at the service"
            + (f". Last answer: {state.last_error}" if state.last_error else ""),
        ) from state.last_error

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

    def _is_pending(self, body: dict[str, Any]) -> bool:
        return str(body.get("type", "")).lower() == "try_again" or body.get("status") == "pending"

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

    async def _after_pending(self, body: dict[str, Any]) -> None:
        """A 200 that says "not yet" did not wait at the service, so wait here."""
        state = self.watch.see(body, self.promise.request_id)
        asked = body.get("retry_after_ms")
        if isinstance(asked, int | float) and asked >= 0:
            await self.transport.clock.sleep(asked / 1000)
        elif state in _PAUSED or body.get("status") == "pending":
            await self.transport.clock.sleep(_PAUSED_WAIT)

    async def _after_error(self, state: _Progress, response: RawResponse) -> None:
        error = self.transport.error(_RETRIEVE, self.transport.url(_RETRIEVE.path), response)
        error.request_id = self.promise.request_id
        status = response.status
        state.last_error = error
        if status == 408 or status >= 500:
            self.watch.see(error.body, self.promise.request_id)
            delay = poll_delay(self._backoff, state.iteration - 1)
            if delay > 0:
                await self.transport.clock.sleep(delay)
        elif status == 429:
            self.watch.see(error.body, self.promise.request_id)
            state.busy += 1
            await self._wait(backoff(state.busy - 1), error)
        elif status == 402 and state.unpaid < self.transport.billing_window:
            state.unpaid += BILLING_WAIT
            await self._wait(BILLING_WAIT, error)
        else:
            doubts = state.refusals.get(status, 0)
            if doubts >= _DOUBTED.get(status, 0):
                raise error
            state.refusals[status] = doubts + 1
            if doubts:  # at once, then after 1, 2, 4 … s: what said it may need a while to be well
                await self.transport.clock.sleep(backoff(doubts - 1))

    @property
    def _backoff(self) -> PollBackoffOption | PollBackoff:
        chosen = self.poll_backoff
        return self.transport.config.poll_backoff if chosen is None else chosen

    async def _after_silence(self, state: _Progress, error: APIConnectionError) -> None:
        now = self.transport.clock.monotonic()
        if self.deadline is not None and now >= self.deadline:
            return  # the next check says so
        silent = now - state.last_heard
        state.last_error = error
        if silent >= UNREACHABLE_LIMIT and state.silences >= _UNREACHABLE_POLLS:
            raise error
        wait = backoff(state.silences)
        state.silences += 1
        self.transport.notices.retry(
            self._name,
            error,
            state.silences - 1,
            silent,
            wait,
            f"giving up after {UNREACHABLE_LIMIT / 3600:.0f} h without an answer",
        )
        await self.transport.clock.sleep(wait)

    async def _wait(self, seconds: float, error: TinkerError) -> None:
        if wants(Throttled):
            emit(Throttled(seconds, str(error), metadata=current_metadata()))
        self.transport.notices.paused(self._name, str(error))
        await self.transport.clock.sleep(seconds)


@dataclass(slots=True)
class _Progress:
    """What one poll has seen so far."""

    started: float
    last_heard: float
    iteration: int = 0
    silences: int = 0
    busy: int = 0
    refusals: dict[int, int] = field(default_factory=dict)
    unpaid: float = 0.0
    reserved: bool = False
    last_error: TinkerError | None = None

    def heard(self, now: float, status: int) -> None:
        """Any answer ends a silence, and an answer of another kind a series of one kind."""
        self.last_heard = now
        self.silences = 0
        if status != 429:
            self.busy = 0
        if status != 402:
            self.unpaid = 0.0
        if self.refusals and status not in _DOUBTED:
            self.refusals.clear()


def _failure(error: TinkerError) -> type[FutureFailure]:
    for kind, event in _FAILURES:
        if isinstance(error, kind):
            return event
    return FutureApiError


#: What a failed poll is called; the first class that fits.
_FAILURES: Final[tuple[tuple[type[TinkerError], type[FutureFailure]], ...]] = (
    (APITimeoutError, FutureTimeout),
    (APIConnectionError, FutureConnectionError),
    (RequestFailedError, FutureRequestFailed),
    (APIResponseValidationError, FutureValidationError),
)
_PAUSED: Final = {QueueState.PAUSED_RATE_LIMIT, QueueState.PAUSED_CAPACITY}
# JSON as second choice: services before 0.18.1 know nothing else.
_ACCEPT_BINARY: Final = f"{proto_codec.CONTENT_TYPE}, application/json;q=0.5"


def _is_proto(response: RawResponse) -> bool:
    return proto_codec.CONTENT_TYPE in (response.headers.get("content-type") or "")


def _forward_backward_output(data: bytes, _: Sequence[str] | None) -> ForwardBackwardOutput:
    return proto_codec.decode_forward_backward_output(data)


_BINARY_READERS: Final[dict[Any, Callable[[bytes, Sequence[str] | None], Any]]] = {
    ForwardBackwardOutput: _forward_backward_output,
    SampleResponse: proto_codec.decode_sample_response,
}
