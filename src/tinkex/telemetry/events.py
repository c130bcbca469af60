"""The events that the client emits: one frozen dataclass per event.

Every class names its event and those of its fields that are measurements; the other fields and `metadata` say what
was measured. `metadata` contains the names that the service and the user give: `session_id`, `model_id`,
`sampling_session_id`, `seq_id`, the `user_metadata` of the settings, and the values of `tinkex.telemetry.metadata`.
Times are in seconds; `system_time` is wall-clock time. Events of one call or request share an `id`.

A subscription to a class includes all classes derived from it: `HttpEvent` means all requests, `Event` means all
events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Literal, TypeVar, dataclass_transform

__all__ = [
    "CheckpointSelected",
    "CircuitStateChange",
    "ClientCreated",
    "CustomLossEvent",
    "CustomLossException",
    "CustomLossStart",
    "CustomLossStop",
    "Event",
    "FutureApiError",
    "FutureCancelled",
    "FutureCompleted",
    "FutureConnectionError",
    "FutureEvent",
    "FutureFailure",
    "FuturePolled",
    "FutureRequestFailed",
    "FutureSubmitted",
    "FutureTimeout",
    "FutureValidationError",
    "HeartbeatFailed",
    "HttpEvent",
    "HttpRequestException",
    "HttpRequestStart",
    "HttpRequestStop",
    "MetricsLogged",
    "OperationEvent",
    "OperationException",
    "OperationStart",
    "OperationStop",
    "QueueStateChange",
    "RecoveryCompleted",
    "RecoveryDetected",
    "RecoveryEvent",
    "RecoveryExhausted",
    "RecoveryFailed",
    "RecoveryPollError",
    "RecoveryStarted",
    "RegularizerEvent",
    "RegularizerException",
    "RegularizerStart",
    "RegularizerStop",
    "RetryAttemptFailed",
    "RetryAttemptRetry",
    "RetryAttemptStart",
    "RetryAttemptStop",
    "RetryEvent",
    "SampleStop",
    "SessionClosed",
    "SessionEvent",
    "SessionOpened",
    "Throttled",
    "TrainingPass",
    "TrainingStep",
    "concrete",
]

E = TypeVar("E", bound="Event")

_concrete: Final[list[type[Event]]] = []


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _event(name: str = "", *measured: str) -> Callable[[type[E]], type[E]]:
    """Define the event `tinkex.<name>`; without a name, a base class of several events."""

    def make(cls: type[E]) -> type[E]:
        # `Event` has the other methods: generating them for every class takes most of the import. A class without a
        # docstring would get one from `dataclass`, which inspects the signature for it.
        cls.__doc__ = cls.__doc__ or (f"The event `tinkex.{name}`." if name else "Several events.")
        made = dataclass(frozen=True, slots=True, repr=False, eq=False)(cls)
        if name:
            made.name, made.measured = f"tinkex.{name}", measured
            positional = [each.name for each in fields(made) if not each.kw_only]
            made.places = {field: place for place, field in enumerate(positional)}
            _concrete.append(made)
        return made

    return make


@_event()
class Event:
    name: ClassVar[str]
    measured: ClassVar[tuple[str, ...]] = ()
    #: The positional fields and their indexes.
    places: ClassVar[Mapping[str, int]] = {}

    metadata: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __repr__(self) -> str:
        shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, each.name) == getattr(other, each.name) for each in fields(self))

    __hash__ = None  # type: ignore[assignment]  # the metadata is a dict

    @property
    def measurements(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.measured}

    @property
    def facts(self) -> dict[str, Any]:
        """The fields that are not measurements, with the metadata; where names clash, the metadata wins."""
        own = (each.name for each in fields(self) if each.name not in self.measured)
        return {name: getattr(self, name) for name in own if name != "metadata"} | {**self.metadata}


def concrete() -> tuple[type[Event], ...]:
    """Every event class that the client can emit."""
    return tuple(_concrete)


# -- operations: one call of a client's method -----------------------------------------------------


@_event()
class OperationEvent(Event):
    id: int
    operation: str


@_event("operation.start", "system_time")
class OperationStart(OperationEvent):
    system_time: float


@_event("operation.stop", "duration")
class OperationStop(OperationEvent):
    duration: float


@_event("operation.exception", "duration")
class OperationException(OperationEvent):
    duration: float
    error: BaseException


@_event("sampling.stop", "duration", "prompt_tokens", "cached_tokens", "sampled_tokens")
class SampleStop(OperationEvent):
    """Sequences were sampled; `cached_tokens` of the prompt came from the cache."""

    duration: float
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    sequences: int


@_event("training.pass", "duration", "tokens", "loss")
class TrainingPass(OperationEvent):
    """A pass over `data` examples is finished; with a custom loss, the tokens of both passes count."""

    duration: float
    data: int
    tokens: int
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@_event("training.step", "duration")
class TrainingStep(OperationEvent):
    """The weights were updated."""

    duration: float
    metrics: Mapping[str, float]


@_event("training.log")
class MetricsLogged(Event):
    """The training loop reported metrics with `TrainingClient.log`."""

    step: int
    metrics: Mapping[str, float]


# -- HTTP requests ---------------------------------------------------------------------------------


@_event()
class HttpEvent(Event):
    id: int
    method: str
    path: str
    pool_type: str
    base_url: str


@_event("http.request.start", "system_time")
class HttpRequestStart(HttpEvent):
    system_time: float


@_event("http.request.stop", "duration")
class HttpRequestStop(HttpEvent):
    """An answer came; `result` is `ok` for a 2xx status."""

    duration: float
    status: int
    result: str
    retry_count: int


@_event("http.request.exception", "duration")
class HttpRequestException(HttpEvent):
    """No answer came."""

    duration: float
    kind: str
    reason: str
    stacktrace: str


# -- promises and queues ---------------------------------------------------------------------------


@_event("queue.state_change")
class QueueStateChange(Event):
    request_id: str | None
    queue_state: str
    queue_state_reason: str | None


@_event()
class FutureEvent(Event):
    request_id: str
    request_type: str


@_event("future.submitted", "roundtrip")
class FutureSubmitted(FutureEvent):
    """The service accepted a request and promised its result."""

    roundtrip: float | None


@_event("future.polled")
class FuturePolled(FutureEvent):
    iteration: int
    status: int


@_event("future.completed", "elapsed_time")
class FutureCompleted(FutureEvent):
    elapsed_time: float
    iteration: int


@_event("future.cancelled", "elapsed_time")
class FutureCancelled(FutureEvent):
    """The caller no longer waits for the result."""

    elapsed_time: float
    iteration: int


@_event()
class FutureFailure(FutureEvent):
    elapsed_time: float
    iteration: int
    status: int | None
    category: str
    error_type: str


@_event("future.timeout", "elapsed_time")
class FutureTimeout(FutureFailure): ...


@_event("future.api_error", "elapsed_time")
class FutureApiError(FutureFailure): ...


@_event("future.connection_error", "elapsed_time")
class FutureConnectionError(FutureFailure): ...


@_event("future.request_failed", "elapsed_time")
class FutureRequestFailed(FutureFailure): ...


@_event("future.validation_error", "elapsed_time")
class FutureValidationError(FutureFailure): ...


# -- retries ---------------------------------------------------------------------------------------


@_event()
class RetryEvent(Event):
    operation: str | None
    attempt: int


@_event("retry.attempt.start", "system_time")
class RetryAttemptStart(RetryEvent):
    system_time: float


@_event("retry.attempt.stop", "duration")
class RetryAttemptStop(RetryEvent):
    duration: float
    result: str = "ok"


@_event("retry.attempt.retry", "duration", "delay")
class RetryAttemptRetry(RetryEvent):
    """The attempt failed; the next one starts in `delay` seconds."""

    duration: float
    delay: float
    error: BaseException


@_event("retry.attempt.failed", "duration")
class RetryAttemptFailed(RetryEvent):
    """The attempt failed and is the last: the policy gave up (`failed`), or the error was unexpected (`exception`)."""

    duration: float
    result: Literal["failed", "exception"]
    error: BaseException


@_event("throttled", "delay")
class Throttled(Event):
    """The service asked for a pause."""

    delay: float
    reason: str


@_event("circuit.state_change", "failures")
class CircuitStateChange(Event):
    """A circuit breaker opened, admits a probe (`half_open`), or closed; `failures` counts failures in a row."""

    circuit: str
    state: Literal["closed", "open", "half_open"]
    failures: int
    retry_after: float


# -- sessions --------------------------------------------------------------------------------------


@_event()
class SessionEvent(Event):
    session_id: str


@_event("session.opened")
class SessionOpened(SessionEvent):
    base_url: str


@_event("session.closed")
class SessionClosed(SessionEvent):
    reason: str


@_event("session.heartbeat_failed", "silence")
class HeartbeatFailed(SessionEvent):
    silence: float
    error: BaseException


# -- custom losses and regularizers ----------------------------------------------------------------


@_event()
class CustomLossEvent(Event): ...


@_event("custom_loss.start", "system_time")
class CustomLossStart(CustomLossEvent):
    system_time: float
    regularizer_count: int
    track_grad_norms: bool


@_event("custom_loss.stop", "duration", "loss_total", "regularizer_total")
class CustomLossStop(CustomLossEvent):
    duration: float
    loss_total: float
    regularizer_total: float
    regularizer_count: int


@_event("custom_loss.exception", "duration")
class CustomLossException(CustomLossEvent):
    duration: float
    reason: str


@_event()
class RegularizerEvent(Event):
    regularizer_name: str
    weight: float


@_event("regularizer.compute.start", "system_time")
class RegularizerStart(RegularizerEvent):
    system_time: float
    is_async: bool


@_event("regularizer.compute.stop", "duration", "value", "contribution", "grad_norm")
class RegularizerStop(RegularizerEvent):
    duration: float
    value: float
    contribution: float
    grad_norm: float | None
    is_async: bool


@_event("regularizer.compute.exception", "duration")
class RegularizerException(RegularizerEvent):
    duration: float
    reason: str


# -- recovery --------------------------------------------------------------------------------------


@_event()
class RecoveryEvent(Event):
    run_id: str


@_event("recovery.detected")
class RecoveryDetected(RecoveryEvent):
    """A run is corrupted; `checkpoint` is the newest one known."""

    checkpoint: str | None = None


@_event("recovery.poll_error")
class RecoveryPollError(RecoveryEvent):
    error: BaseException


@_event("recovery.started", "attempt")
class RecoveryStarted(RecoveryEvent):
    attempt: int
    strategy: str


@_event("recovery.checkpoint_selected", "attempt")
class CheckpointSelected(RecoveryEvent):
    attempt: int
    strategy: str
    checkpoint: str


@_event("recovery.client_created", "attempt")
class ClientCreated(RecoveryEvent):
    attempt: int
    strategy: str
    checkpoint: str
    client: object


@_event("recovery.completed", "attempt")
class RecoveryCompleted(RecoveryEvent):
    attempt: int
    strategy: str
    checkpoint: str
    client: object


@_event("recovery.failed", "attempt")
class RecoveryFailed(RecoveryEvent):
    attempt: int
    strategy: str
    error: BaseException


@_event("recovery.exhausted", "attempt")
class RecoveryExhausted(RecoveryEvent):
    attempt: int
    strategy: str
    error: BaseException | None
