"""Sends a session's events to its service.

Events wait in a queue and are sent in batches: every ten seconds, or at once when a hundred wait. A batch stays in
the queue until the service has accepted it, so a failing service delays events but does not lose them. When the queue
is full, `log` drops the event and returns False. Events logged before the session is open wait for it and belong to
it. Closing waits until the queue is empty, but never longer than its limit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import platform
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol, get_args
from uuid import uuid4
from weakref import WeakSet

from tinkex import types
from tinkex._retry import Clock, Tried, exponential, retrying
from tinkex._version import PARITY_VERSION
from tinkex.errors import ClientClosedError, GoneError, InvalidInputError, TinkerError
from tinkex.telemetry.lazy_events import event_types

from . import bus
from .exceptions import report_endings_to, user_error_in, without_keys

__all__ = ["Limits", "Reporter"]

_logger = logging.getLogger("tinkex")

_MAX_BACKOFF: Final = 8.0
_MAX_DEPTH: Final = 6
#: Grace period for work that enforces its own deadline, so that it can return its result.
_GRACE: Final = 0.5


class _Pending(Protocol):
    def result(self, timeout: float | None) -> Any: ...


class Ship(Protocol):
    """Sends one batch, with the same `key` for every attempt. Raises a TinkerError if the batch did not arrive."""

    def __call__(
        self, batch: types.TelemetrySendRequest, key: str, deadline: float | None
    ) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in events, times in seconds."""

    queue: int = 10_000
    batch: int = 100
    threshold: int = 100
    interval: float = 10.0
    retries: int = 3
    retry_delay: float = 1.0  #: before the first retry; doubles, up to 8 s
    request: float = 5.0  #: for one attempt to send a batch
    drain: float = 30.0
    stop: float = 5.0


@dataclass(frozen=True, slots=True)
class _Batch:
    key: str
    events: list[types.TelemetryEvent]


class Reporter:
    """The telemetry of one session; `spawn` runs a coroutine on the client's loop.

    With `enabled=False` it accepts and sends nothing: `log` returns False, and the reporter itself is falsy, so that
    callers need no special case for disabled telemetry.
    """

    def __init__(
        self,
        ship: Ship,
        spawn: Callable[[Coroutine[Any, Any, Any]], _Pending],
        clock: Clock,
        limits: Limits | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self.limits = limits or Limits()
        self.session_id: str | None = None
        self._ship = ship
        self._spawn = spawn
        self._clock = clock
        self._subscription: int | None = None
        self._kinds_chosen = False
        self._lock = bus.lock()
        self._began = clock.monotonic()
        self._enabled = enabled
        self._stopped = not enabled
        self.begin_anew()

    def __bool__(self) -> bool:
        return self._enabled

    def begin_anew(self) -> None:
        """Start with an empty queue, as a forked child must: the parent sends the events queued before."""
        self._queue: deque[types.TelemetryEvent] = deque()
        self._announced = False
        self._index = 0
        self._batch: _Batch | None = None
        self._running = self._overflowing = False
        self._told: WeakSet[TinkerError] = WeakSet()
        self._process = uuid4().hex
        self._sending = asyncio.Lock()
        self._due = asyncio.Event()
        self._hurry = asyncio.Event()

    # -- reporting ---------------------------------------------------------------------------

    def log(
        self, event_name: str, event_data: Mapping[str, Any] | None = None, severity: str = "INFO"
    ) -> bool:
        """Queue an event; False if the queue is full or the session is closed."""
        data = _plain(dict(event_data or {}))
        return self._put(types.GenericEvent, severity, event_name=str(event_name), event_data=data)

    def log_exception(self, exception: BaseException, severity: str = "ERROR") -> bool:
        """Queue an exception and send it now."""
        return self._put_exception(exception, severity) and self.flush()

    def _put_exception(self, exception: BaseException, severity: str) -> bool:
        """As the user's error if its chain contains one, else as unhandled."""
        mistake = user_error_in(exception)
        if mistake is not None:
            return self._put_mistake(mistake)
        return self._put(
            types.UnhandledExceptionEvent,
            severity,
            error_type=type(exception).__name__,
            error_message=without_keys(str(exception)),
            traceback=without_keys("".join(traceback.format_exception(exception))),
        )

    def _put_mistake(self, mistake: BaseException, **more: Any) -> bool:
        """Report an error of the user; a TinkerError only once, even if several layers report it."""
        if isinstance(mistake, TinkerError):
            if mistake in self._told:
                return True
            self._told.add(mistake)
        data = {
            "error_type": type(mistake).__name__,
            "message": without_keys(str(mistake)),
            "status_code": getattr(mistake, "status_code", None),
            "body": getattr(mistake, "body", None),
            **more,
        }
        return self.log("user_error", data, "WARNING")

    def log_fatal_exception(
        self, exception: BaseException, severity: str = "ERROR", *, timeout: float | None = None
    ) -> bool:
        """Report the exception that ends the program, and wait until it is sent or the time is up."""
        accepted = self._put_exception(exception, severity)
        self._end()
        _logger.info("Session %s ends with %s.", self.session_id, type(exception).__name__)
        return self.wait_until_drained(timeout) and accepted

    def listen(self) -> None:
        """Forward failed calls and changes of the queue, unless `capture` has chosen other events.

        Single requests are not forwarded: a client that samples sends thousands per second.
        """
        with self._lock:  # several threads may make the first calls of a client
            chosen, self._kinds_chosen = self._kinds_chosen, True
        if not chosen:
            self.capture(event_types.OperationException, event_types.QueueStateChange)

    def capture(self, *kinds: type[event_types.Event]) -> None:
        """Forward these events of the session instead of those forwarded now."""
        self._kinds_chosen = True
        if self._subscription is not None:
            bus.detach(self._subscription)
            self._subscription = None
        if kinds and not self._stopped:
            self._subscription = bus.attach(self._forward, *kinds)

    def _forward(self, event: event_types.Event) -> None:
        if self.session_id is None or event.metadata.get("session_id") != self.session_id:
            return
        if isinstance(event, event_types.HttpEvent) and event.pool_type == "telemetry":
            return  # else each report would create a new event to report
        if isinstance(event, event_types.OperationException):
            if not isinstance(event.error, Exception):
                return  # a cancellation is not a failure
            if (mistake := user_error_in(event.error)) is not None:
                self._put_mistake(mistake, operation=event.operation)
                return
        severity = "INFO"
        if event.name.endswith(".exception"):
            severity = "ERROR"
        elif isinstance(event, event_types.FutureFailure):
            severity = "WARNING"
        facts = {name: value for name, value in event.facts.items() if name != "session_id"}
        self.log(event.name, {"measurements": event.measurements, "metadata": facts}, severity)

    # -- session start and end ---------------------------------------------------------------

    def opened(self, session_id: str, *, owner: bool) -> None:
        """The session is open. Only its owner reports its start and end."""
        self.session_id = session_id
        if owner and not self._announced:
            self._announced = True
            self._began = self._clock.monotonic()
            self._put(types.SessionStartEvent, "INFO", first=True)
        elif self._queue:
            self._begin_rounds()
        self.listen()

    def _end(self) -> None:
        if self._announced:
            self._announced = False
            duration = timedelta(seconds=self._clock.monotonic() - self._began)
            self._put(types.SessionEndEvent, "INFO", duration=str(duration))

    async def close(self, timeout: float | None = None) -> bool:
        """End the report and send the rest; False if events are left after the limit."""
        self.capture()
        self._running = True  # no other task sends from here on
        self._end()
        self._stopped = True
        return await self.drain(self.limits.stop if timeout is None else timeout)

    def stop(self, timeout: float | None = None) -> bool:
        """`close` from any thread except the client's own."""
        limit = self.limits.stop if timeout is None else timeout
        return self._stopped or self._wait_for(self.close(limit), limit)

    # -- sending -----------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Events in the queue that the service has not accepted yet."""
        return len(self._queue)

    def flush(self, *, wait: bool = False, timeout: float | None = None) -> bool:
        """Send the queue without waiting for the next round; with `wait`, block until it is empty."""
        if wait:
            return self.wait_until_drained(timeout)
        if self._queue:
            self._wake(self._due)
        return True

    def wait_until_drained(self, timeout: float | None = None) -> bool:
        """Send everything; False if events are left after `timeout` seconds (default 30)."""
        if not self._queue:
            return True
        limit = self.limits.drain if timeout is None else timeout
        return self._wait_for(self.drain(limit), limit)

    def _wait_for(self, work: Coroutine[Any, Any, bool], limit: float) -> bool:
        try:
            return bool(self._spawn(work).result(limit + _GRACE))
        except (ClientClosedError, TimeoutError):
            return not self._queue

    async def drain(self, timeout: float) -> bool:
        """Send everything, retrying for `timeout` seconds."""
        deadline = self._clock.monotonic() + timeout
        self._hurry.set()  # ends a pause of the running round after a failure
        try:
            async with asyncio.timeout(timeout):  # ends an attempt that hangs
                return await self._ship_all(deadline)
        except TimeoutError:
            return False

    def _put(
        self,
        kind: Callable[..., types.TelemetryEvent],
        severity: str,
        *,
        first: bool = False,
        **fields: Any,
    ) -> bool:
        """Queue an event; a `first` event goes before those that wait, unless some are sent already."""
        severity = severity.upper()
        if severity not in get_args(types.Severity):
            raise InvalidInputError(
                f"must be one of {sorted(get_args(types.Severity))}", field="severity"
            )
        with self._lock:
            if self._stopped or self._is_full():
                return False
            first = first and self._index == len(self._queue) and self._batch is None
            event = kind(
                event_id=uuid4().hex,
                event_session_index=0 if first else self._index,
                severity=severity,
                timestamp=datetime.fromtimestamp(self._clock.wall(), UTC),
                **fields,
            )
            if first:
                waiting = enumerate(self._queue, 1)
                moved = (each.model_copy(update={"event_session_index": n}) for n, each in waiting)
                self._queue = deque([event, *moved])
            else:
                self._queue.append(event)
            self._index += 1
            many = len(self._queue) == self.limits.threshold
        held = self.session_id is None
        if not (self._hold() if held else self._begin_rounds()):
            with self._lock:
                self._queue.remove(event)
            return False
        if many and not held:
            self._wake(self._due)
        return True

    def _hold(self) -> bool:
        """Keep events for a session that may open; if none opens, they are sent when the client or program ends."""
        report_endings_to(self)
        # The loop must be running then: at the end of a program it can no longer be started.
        return self._start(_nothing())

    def _begin_rounds(self) -> bool:
        """Start to send in rounds; False if the client was closed just now."""
        with self._lock:
            idle, self._running = not self._running, True
        return self._start(self._run()) if idle else True

    def _start(self, work: Coroutine[Any, Any, None]) -> bool:
        try:
            self._spawn(work)
        except ClientClosedError:
            return False
        return True

    def _is_full(self) -> bool:
        full = len(self._queue) >= self.limits.queue
        if full and not self._overflowing:
            _logger.warning(
                "Telemetry: the queue is full (%d events); new events are dropped.",
                len(self._queue),
            )
        self._overflowing = full
        return full

    def _wake(self, event: asyncio.Event) -> None:
        async def wake() -> None:
            event.set()

        with suppress(ClientClosedError):
            self._spawn(wake())

    async def _run(self) -> None:
        """Send in rounds until the queue is empty."""
        while True:
            await self._pause(self.limits.interval, self._due)
            self._due.clear()
            await self._ship_all(None)
            with self._lock:
                if not self._queue:
                    self._running = False
                    return

    async def _ship_all(self, deadline: float | None) -> bool:
        """Send batch after batch; without a deadline, `limits.retries` failed retries of a batch end the round."""
        async with self._sending:
            self._hurry.clear()
            delay = self.limits.retry_delay
            policy = (
                _ShipPolicy(delay, self.limits.retries, self._hurry)
                if deadline is None
                else _ShipPolicy(delay)
            )
            sleep = self._pause_unless_hurried if deadline is None else self._clock.sleep
            now, wall, chance = self._clock.monotonic, self._clock.wall, self._clock.random
            clock = Clock(monotonic=now, wall=wall, sleep=sleep, random=chance)
            while (batch := self._next_batch()) is not None:
                if deadline is not None and now() >= deadline:
                    return False
                send = partial(self._send, batch, deadline)
                try:
                    await retrying(send, policy, clock, deadline=deadline)
                except TinkerError:
                    return False
                self._forget(batch)
            return True

    async def _send(self, batch: _Batch, deadline: float | None, _attempt: int) -> None:
        """Send a batch. Raises if a retry may help; a batch that is refused for good counts as sent and is dropped."""
        request = types.TelemetrySendRequest(
            events=batch.events,
            platform=platform.system(),
            sdk_version=PARITY_VERSION,
            session_id=self.session_id or f"sessionless-{self._process}",
            process_uuid=self._process,
        )
        until = self._clock.monotonic() + self.limits.request
        try:
            await self._ship(
                request, batch.key, until if deadline is None else min(until, deadline)
            )
        except TinkerError as error:
            _logger.debug("The service did not accept telemetry: %s", error)
            if error.retryable and not isinstance(error, GoneError):
                raise
        except Exception:
            _logger.debug("Telemetry could not be sent", exc_info=True)

    def _next_batch(self) -> _Batch | None:
        with self._lock:
            if self._batch is None and self._queue:
                self._batch = _Batch(
                    f"tinkex-telemetry-{uuid4().hex}", list(islice(self._queue, self.limits.batch))
                )
            return self._batch

    def _forget(self, batch: _Batch) -> None:
        with self._lock:
            for _ in batch.events:
                self._queue.popleft()
            self._batch = None

    async def _pause_unless_hurried(self, seconds: float) -> None:
        await self._pause(seconds, self._hurry)

    async def _pause(self, seconds: float, unless: asyncio.Event) -> None:
        waiting = [
            asyncio.ensure_future(self._clock.sleep(seconds)),
            asyncio.ensure_future(unless.wait()),
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()


async def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class _ShipPolicy:
    """Backoff between attempts to send a batch; `retries` and `hurry` end the attempts of one round."""

    delay: float
    retries: int | None = None
    hurry: asyncio.Event | None = None  # set while a caller waits for the queue to empty

    def wait_before_retry(self, error: Exception, tried: Tried) -> float | None:
        hurried = self.hurry is not None and self.hurry.is_set()
        if tried.attempt == self.retries or hurried or not isinstance(error, TinkerError):
            return None
        return exponential(tried.attempt, self.delay, _MAX_BACKOFF) * (1 + 0.1 * tried.chance)


def _plain(value: Any, depth: int = 0) -> Any:
    """A value that JSON can carry; other values as text."""
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return _plain(value.value, depth)
    if isinstance(value, BaseException):
        return without_keys(f"{type(value).__name__}: {value}")
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(name): _plain(entry, depth + 1) for name, entry in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(entry, depth + 1) for entry in value]
    return str(value)[:2000]
