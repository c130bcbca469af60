"""Reports the queue state of a request, and its reason, to observers and the log."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tinkex import types
from tinkex.telemetry.bus import emit, wants
from tinkex.telemetry.calls import current_metadata
from tinkex.telemetry.lazy_events import event_types

from .notices import logger

__all__ = ["Observer", "QueueLogger", "QueueWatch", "observer_of", "resolve_reason"]

ClientKind: TypeAlias = Literal["Sampling", "Training"]
#: Called with the state and, if it takes two arguments, with the reason.
Observer: TypeAlias = Callable[..., object]

#: Seconds before the same pause is logged again.
DEBOUNCE = 60.0

_RATE_LIMIT = {
    "Sampling": "concurrent sampler weights limit hit",
    "Training": "concurrent training clients rate limit hit",
}
_CAPACITY = "Tinker backend is running short on capacity, please wait"


def resolve_reason(state: types.QueueState, kind: ClientKind, reason: str | None = None) -> str:
    """Why a client waits: the reason given by the service, or else a default for the state."""
    if reason and reason.strip():
        return reason.strip()
    if state is types.QueueState.PAUSED_RATE_LIMIT:
        return _RATE_LIMIT[kind]
    if state is types.QueueState.PAUSED_CAPACITY:
        return _CAPACITY
    return "unknown"


class QueueLogger:
    """Logs that a client is paused, at most once a minute however many of its requests wait."""

    def __init__(self, kind: ClientKind, name: str, monotonic: Callable[[], float]) -> None:
        self._kind: ClientKind = kind
        self._name = name
        self._monotonic = monotonic
        self._last: float | None = None

    def __call__(self, state: types.QueueState, reason: str | None = None) -> None:
        if state is types.QueueState.ACTIVE:
            return
        now = self._monotonic()
        if self._last is None or now - self._last >= DEBOUNCE:
            self._last = now
            why = resolve_reason(state, self._kind, reason)
            logger.warning("%s is paused for %s. Reason: %s", self._kind, self._name, why)

    def clear(self) -> None:
        """Log the next pause even if the last one was less than a minute ago."""
        self._last = None


def observer_of(observer: Observer | Any) -> Observer:
    """Accept a callable of one or two arguments, or an object with `on_queue_state_change`."""
    method = getattr(observer, "on_queue_state_change", None)
    call: Observer = method if callable(method) else observer
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return call
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if len(positional) >= 2 or variadic:
        return call
    return lambda state, _reason=None: call(state)


@dataclass(slots=True)
class QueueWatch:
    """Calls the observers once per change of the state or reason of one request."""

    observers: tuple[Observer, ...] = ()
    _seen: tuple[types.QueueState, str | None] | None = None

    def see(self, body: Any, request_id: str | None = None) -> types.QueueState | None:
        """Read the queue state from an answer body, if it has one."""
        if not isinstance(body, Mapping) or "queue_state" not in body:
            return None
        reason = body.get("queue_state_reason")
        state = types.QueueState.parse(body["queue_state"])
        self.tell(state, reason if isinstance(reason, str) else None, request_id)
        return state

    def tell(
        self, state: types.QueueState, reason: str | None, request_id: str | None = None
    ) -> None:
        if self._seen == (state, reason):
            return
        self._seen = (state, reason)
        if wants(event_types.QueueStateChange):
            emit(
                event_types.QueueStateChange(
                    request_id, state.value, reason, metadata=current_metadata()
                )
            )
        for observer in self.observers:
            try:
                observer(state, reason)
            except Exception:
                logger.exception("A queue state observer failed")
