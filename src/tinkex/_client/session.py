"""A session with a service: the state that its clients share.

The first call that needs it opens it: it fetches the service's flags, creates the session, and starts a heartbeat every
`heartbeat_interval` seconds (10 by default) until the session is closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from weakref import WeakSet, finalize, ref

from pydantic import ValidationError

from tinkex import types
from tinkex._retry import Clock
from tinkex._version import PARITY_VERSION
from tinkex._wire.lazy_codecs import json_codec
from tinkex._wire.operations import Operation, operation
from tinkex.config import Config, PollBackoffOption
from tinkex.errors import (
    APITimeoutError,
    ClientClosedError,
    InvalidInputError,
    NotFoundError,
    TinkerError,
)
from tinkex.telemetry import calls
from tinkex.telemetry.bus import emit, wants
from tinkex.telemetry.exceptions import report_endings_to
from tinkex.telemetry.lazy_events import event_types
from tinkex.telemetry.logs import apply_log_level
from tinkex.telemetry.reporter import Reporter

from .checks import check_timeout
from .connection import LazyTransport
from .heartbeat import Heartbeat
from .labels import Labels
from .notices import logger
from .opened import About, Configured, Numbers, Opened
from .passes import TrainingWire
from .polling import Poll
from .queue_state import Observer, QueueWatch
from .runtime import APIFuture, TaskGroup, begin_anew_in_forks, fail, leave_behind, runtime
from .transport import Transport

if TYPE_CHECKING:
    from .run_log import RunLog

__all__ = ["FinishReason", "Session", "refusing_bad_values"]

T = TypeVar("T")
FinishReason = Literal["success", "errored", "interrupted"]

_LEAST_REFRESH: Final = 10.0
_CLOSE_LIMIT: Final = 5.0
#: Seconds to ship telemetry on closing a client whose session never opened.
_UNOPENED_CLOSE_LIMIT: Final = 1.0
#: Seconds that closing waits for what training loops have logged.
_LOG_CLOSE_LIMIT: Final = 10.0
#: Grace period for operations that enforce their own deadline, so that they can report the cause instead of a bare timeout.
_GRACE: Final = 0.1


class Session:
    """Transport, flags, limits, counters and heartbeat of one service client and its children.

    `session_id` adopts a session that another process opened: this process sends heartbeats for it too, but `close`
    does not finish it; its owner does.
    """

    def __init__(
        self,
        config: Config,
        *,
        user_metadata: Mapping[str, Any] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        session_id: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or Clock()
        self.session_id = session_id
        self._about = About(
            config.user_metadata if user_metadata is None else user_metadata,
            project_id or config.project_id,
            display_name,
        )
        self._connection = LazyTransport(config, self.clock)
        self._group = TaskGroup()
        self._background: set[asyncio.Task[Any]] = set()
        self._configuring: asyncio.Task[Configured] | None = None
        self._opening: asyncio.Task[Opened] | None = None
        self._current: Opened | None = None
        self._closing: APIFuture[None] | None = None
        self._close_lock = threading.Lock()
        self._numbers = Numbers()
        self._labels = Labels()
        #: The service's flags and limits; defaults until they are fetched.
        self.service = Configured.of(types.ClientConfigResponse(), config, self.clock)
        self.dynamic = types.ClientDynamicConfigResponse()
        self.training_wire = TrainingWire()
        #: Model id → base model, for models trained here. Events name it, because prices depend on it.
        self.base_models: dict[str, str] = {}
        #: What training loops have logged is sent before the session closes.
        self.run_logs: WeakSet[RunLog] = WeakSet()
        self._carrier = _Carrier(self)
        self.reporter = Reporter(
            self._carrier.ship, self._carrier.spawn, self.clock, enabled=config.telemetry_enabled
        )
        # A session that is dropped before it was opened has no other point at which to stop listening for events.
        finalize(self, self.reporter.capture).atexit = False
        apply_log_level(config.log_level, dump_headers=config.dump_headers)
        begin_anew_in_forks(self)

    def _begin_anew(self) -> None:
        """In a forked child: keep the same session, but with new connections, tasks and counters."""
        leave_behind(self._group, self._background, self._configuring, self._opening)
        self._configuring = self._opening = self._current = None
        self._group, self._background = TaskGroup(), set()
        self._close_lock = threading.Lock()
        self.reporter.begin_anew()
        if self._closing is not None:
            self._closing = APIFuture()
            self._closing.set_result(None)
        if self.session_id is not None:
            self._numbers = Numbers.of_a_copy()

    # -- running work ------------------------------------------------------------------------

    def submit(
        self,
        work: Coroutine[Any, Any, T],
        future: APIFuture[T] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[T]:
        """Run `work` on the runtime's loop as part of this session.

        After `timeout` seconds the future fails, even if the work still waits for something.
        """
        if self._closing is not None:
            raise _closed(work)
        future = APIFuture() if future is None else future
        # Copy the caller's trace context: the loop starts work of many callers in one batch.
        traced = self.config.otel_propagate or wants(event_types.OperationStart)
        runtime().submit(work, future, self._group, copy_context() if traced else None)
        if timeout is not None:
            runtime().post(self._fail_after, timeout, future)
        return future

    def _submit_aside(self, work: Coroutine[Any, Any, T]) -> APIFuture[T]:
        """Run internal work of the session that belongs to no call."""
        if self._closing is not None:
            raise _closed(work)
        return runtime().submit(work, APIFuture(), self._group, Context())

    def _fail_after(self, timeout: float, future: APIFuture[Any]) -> None:
        def expire() -> None:
            fail(future, self._expired(timeout))

        timer = asyncio.get_running_loop().call_later(timeout + _GRACE, expire)
        future.add_done_callback(lambda _: runtime().post(timer.cancel))

    def _expired(self, timeout: float) -> APITimeoutError:
        """The error of work that waited too long; if it waited for the session to open, the cause is why it does not."""
        message = f"The operation was not finished within {timeout:g} s."
        transport = self._connection.made
        cause = None if transport is None else transport.unopened
        if cause is not None:
            message = f"{message} No session could be opened until then: {cause}"
        error = APITimeoutError(message=message)
        error.__cause__ = cause
        return error

    def start_call(
        self,
        name: str,
        request: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> APIFuture[Any]:
        """Start an operation that is not queued: the answer is the result."""
        deadline = self.deadline(timeout)
        return self.start(
            name,
            lambda: self.call(name, request, path=path, headers=headers, deadline=deadline),
            timeout=timeout,
        )

    def start(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        facts: Callable[[], Mapping[str, Any]] = dict,
        report: Callable[[calls.ClientCall, T, float], object] | None = None,
        future: APIFuture[T] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[T]:
        """Run one operation of the client and emit its events.

        `facts` are added to the metadata of the events; `report(call, result, seconds)` may emit more about a result.
        """
        if timeout is not None:
            check_timeout(timeout)  # raises before any work begins
        if self.session_id is None:
            self.reporter.listen()  # otherwise it would miss the call that opens the session
        if not wants(event_types.Event):
            return self.submit(work(), future, timeout=timeout)
        whose = {**self.metadata, **facts()}
        observed = calls.observed(name, work, self.clock, whose, report)
        return self.submit(observed, future, timeout=timeout)

    def in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a task that no caller waits for. It is cancelled with the session and belongs to no call."""
        self.keep(asyncio.get_running_loop().create_task(work, context=Context()))

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Cancel the task when the session is closed."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def deadline(self, timeout: float | None) -> float | None:
        """The time on the session's clock at which a call times out. Raises if `timeout` is invalid."""
        if timeout is None:
            return None
        check_timeout(timeout)
        return self.clock.monotonic() + timeout

    @property
    def transport(self) -> Transport:
        return self._connection.made or self._connection.transport(self.metadata)

    @property
    def flags(self) -> types.ClientConfigResponse:
        return self.service.flags

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of this session's events."""
        known = {} if self.session_id is None else {"session_id": self.session_id}
        return {**(self._about.user_metadata or {}), **known}

    # -- opening -----------------------------------------------------------------------------

    async def configured(self) -> Configured:
        """The service's flags and limits, fetched once."""
        return await _shared(self, "_configuring", self._configure)

    async def opened(self) -> str:
        """Open the session if needed; returns its id."""
        opened = self._current
        if opened is None:
            opened = await _shared(self, "_opening", self._open)
        call = calls.current_call()
        if call is not None and "session_id" not in call.metadata:
            # The call that opened the session started without its id.
            calls.add_metadata(session_id=opened.session_id)
        return opened.session_id

    async def _configure(self) -> Configured:
        await self._connection.locate()
        row = operation("client_config")
        self.transport.admit(row.pool)
        request = types.ClientConfigRequest(sdk_version=PARITY_VERSION)
        try:
            flags = await self.transport.call(row, request)
        except NotFoundError:  # services before 0.18 have no flags
            flags = types.ClientConfigResponse()
        self.transport.unopened = None
        self.service = Configured.of(flags, self.config, self.clock)
        self.transport.billing_window = flags.billing_exception_max_pause_duration_sec
        if flags.pjwt_auth_enabled:
            self.transport.auth.use_tokens(partial(_exchange_key, self.transport))
        return self.service

    async def _open(self) -> Opened:
        await self.configured()
        transport, is_owner = self.transport, self.session_id is None
        if self.session_id is None:
            row = operation("create_session")
            transport.admit(row.pool)
            call = partial(transport.call, row)
            request = self._about.request(list(self.config.tags))
            created = await self._labels.send(row.name, request, call)
            transport.unopened = None
            self.session_id = created.session_id
            for message, say in (
                (created.info_message, logger.info),
                (created.warning_message, logger.warning),
                (created.error_message, logger.error),
            ):
                if message:
                    say("%s", message)
        self._current = opened = Opened(self.session_id, is_owner)
        self._tell_opened(opened)
        self._carrier.transport = transport
        heartbeat = Heartbeat(
            opened.session_id, transport, self.metadata, self._group.close, self.clock.monotonic()
        )
        left = _Left(self._connection, self.reporter, self._background)
        self.in_background(heartbeat.keep_beating(ref(self), left.let_go))
        self.in_background(_keep_refreshing(ref(self), self.clock))
        if self.flags.pjwt_auth_enabled:
            self.in_background(transport.auth.keep_fresh())
        return opened

    def _tell_opened(self, opened: Opened) -> None:
        self.transport.metadata = self.metadata
        session_id = opened.session_id
        if wants(event_types.SessionOpened):
            emit(
                event_types.SessionOpened(
                    session_id, self.config.shown_base_url, metadata=self.metadata
                )
            )
        if self.reporter:
            self.reporter.opened(session_id, owner=opened.is_owner)
            report_endings_to(self.reporter)

    # -- background --------------------------------------------------------------------------

    async def _refresh(self) -> float | None:
        """Fetch the dynamic flags. Returns the seconds until the next fetch, or None if the service has none."""
        request = types.ClientConfigRequest(sdk_version=PARITY_VERSION)
        try:
            self.dynamic = await self.transport.call(operation("client_dynamic_config"), request)
        except NotFoundError:
            return None
        except Exception as error:  # a custom HTTP client may raise anything
            logger.debug("The dynamic configuration could not be fetched: %s", error)
        return max(self.dynamic.refresh_interval_sec, _LEAST_REFRESH)

    # -- operations --------------------------------------------------------------------------

    async def call(
        self,
        name: str,
        request: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Run an operation that is not queued and needs no open session."""
        await self.configured()
        row = operation(name)
        self.transport.admit(row.pool)
        return await self.transport.call(
            row, request, path=path, headers=headers, deadline=deadline
        )

    async def promise(
        self,
        row: Operation[object],
        request: Any,
        *,
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> tuple[types.UntypedAPIFuture | Any, float]:
        """Submit a queued operation. Returns its promise or an immediate result, and the seconds that took."""
        started = self.clock.monotonic()
        send = partial(self.transport.send, row, headers=headers, deadline=deadline)
        response = await self._labels.send(row.name, request, send)
        return self.transport.read_promise(row, response), self.clock.monotonic() - started

    async def outcome(
        self,
        row: Operation[T],
        promised: Any,
        promise_seconds: float | None,
        *,
        observers: tuple[Observer, ...] = (),
        deadline: float | None = None,
        poll_backoff: PollBackoffOption | None = None,
    ) -> T:
        """Wait for the promised result. An immediate result is returned unchanged."""
        if not isinstance(promised, types.UntypedAPIFuture):
            return promised  # type: ignore[no-any-return]
        return await Poll(
            self.transport,
            row,
            promised,
            self.service.response_room,
            QueueWatch(observers),
            deadline,
            promise_seconds,
            poll_backoff=poll_backoff,
        ).result()

    async def run(
        self,
        name: str,
        request: Any,
        *,
        observers: tuple[Observer, ...] = (),
        deadline: float | None = None,
    ) -> Any:
        """Submit a queued operation and wait for its result."""
        await self.configured()
        row = operation(name)
        self.transport.admit(row.pool)
        promised, seconds = await self.promise(row, request, deadline=deadline)
        return await self.outcome(row, promised, seconds, observers=observers, deadline=deadline)

    def get_session_id(self) -> str:
        """The id of the session. Opens it if needed, and then blocks until the service answers."""
        return self.session_id or self.submit(self.opened()).result()

    def next_model_seq(self) -> int:
        return next(self._numbers.models)

    def next_sampling_seq(self) -> int:
        return next(self._numbers.samplers)

    # -- closing -----------------------------------------------------------------------------

    def close(self, reason: FinishReason = "success", detail: str | None = None) -> APIFuture[None]:
        """Close the session: running work fails with ClientClosedError; an owned session is finished on the service."""
        with self._close_lock:
            if self._closing is None:
                self._closing = APIFuture()
                runtime().submit(self._close(reason, detail), self._closing, TaskGroup())
            return self._closing

    async def _close(self, reason: FinishReason, detail: str | None) -> None:
        await self._drain_run_logs()
        self._group.close(ClientClosedError("The client was closed before this was finished."))
        for task in self._background:
            task.cancel()
        if self._connection.made is None and not self.reporter.pending:
            return
        if self.session_id is not None and wants(event_types.SessionClosed):
            emit(event_types.SessionClosed(self.session_id, reason, metadata=self.metadata))
        try:
            # The session never opened, so the service probably does not answer: wait only briefly.
            limit = None if self.session_id is not None else _UNOPENED_CLOSE_LIMIT
            endings: list[Awaitable[object]] = [self.reporter.close(limit)]
            if self._current is not None and self._current.is_owner:
                endings.append(self._finish(self._current.session_id, reason, detail))
            await asyncio.gather(*endings)
        finally:
            await self._connection.close()

    async def _drain_run_logs(self) -> None:
        limit = _UNOPENED_CLOSE_LIMIT if self.session_id is None else _LOG_CLOSE_LIMIT
        draining = [log.drain() for log in list(self.run_logs)]
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await asyncio.gather(*draining)

    async def _finish(self, session_id: str, reason: FinishReason, detail: str | None) -> None:
        try:
            await self.transport.call(
                operation("finish_session"),
                types.FinishSessionRequest(reason=_finish_reason(reason), detail=detail),
                path={"session_id": session_id},
                deadline=self.clock.monotonic() + _CLOSE_LIMIT,
            )
        except TinkerError as error:
            logger.debug("Session %s could not be finished: %s", session_id, error)

    @property
    def closed(self) -> bool:
        return self._closing is not None


def _closed(work: Coroutine[Any, Any, Any]) -> ClientClosedError:
    """The error for work that a closed session refuses."""
    work.close()
    return ClientClosedError("The client is closed; make a new one.")


@contextmanager
def refusing_bad_values() -> Iterator[None]:
    """Turn a pydantic ValidationError into an InvalidInputError that names the field."""
    try:
        yield
    except ValidationError as error:
        field, complaint = json_codec.first_complaint(error)
        raise InvalidInputError(complaint, field=field) from error


def _finish_reason(reason: FinishReason) -> types.ClientSessionFinishReason:
    if reason == "success":
        return types.ClientSessionFinishSuccess()
    if reason == "errored":
        return types.ClientSessionFinishErrored()
    return types.ClientSessionFinishInterrupted()


# -- the session's own tasks ---------------------------------------------------------------------
# They hold the session only while they run, so that an unused session can be garbage-collected.


@dataclass(frozen=True, slots=True)
class _Left:
    """The resources of a session that was garbage-collected without being closed."""

    connection: LazyTransport
    reporter: Reporter
    tasks: set[asyncio.Task[Any]]

    async def let_go(self) -> None:
        for task in self.tasks - {asyncio.current_task()}:
            task.cancel()
        await self.reporter.close()
        await self.connection.close()


async def _keep_refreshing(session: ref[Session], clock: Clock) -> None:
    while (living := session()) is not None:
        wait = await living._refresh()
        del living
        if wait is None:
            return
        await clock.sleep(wait)


async def _exchange_key(transport: Transport) -> str:
    token: str = (await transport.call(operation("auth_token"))).jwt
    return token


class _Carrier:
    """Sends a session's telemetry, even after the session itself is garbage-collected."""

    def __init__(self, session: Session) -> None:
        self._session = ref(session)
        self.transport: Transport | None = None
        begin_anew_in_forks(self)

    def _begin_anew(self) -> None:
        leave_behind(self.transport)
        self.transport = None

    def spawn(self, work: Coroutine[Any, Any, T]) -> APIFuture[T]:
        living = self._session()
        if living is not None:
            return living._submit_aside(work)
        return runtime().submit(work, APIFuture(), TaskGroup(), Context())

    async def ship(
        self, batch: types.TelemetrySendRequest, key: str, deadline: float | None
    ) -> None:
        """Send a telemetry batch. Slow or failed sends are not reported to the user."""
        living = self._session()
        if living is not None:
            await living._connection.locate()
        row = replace(operation("telemetry"), timeout=None)  # the reporter sets the deadline
        transport = living.transport if living else self.transport
        if transport is None:
            raise ClientClosedError("The client no longer exists; telemetry cannot be sent.")
        url, headers = transport.url(row.path), {"content-type": "application/json"}
        headers["x-idempotency-key"] = key
        response = await transport.exchange(
            row, url, headers, json_codec.encode(batch), deadline=deadline
        )
        if response.status >= 300:
            raise transport.error(row, url, response)


async def _shared(session: Session, slot: str, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` once for all callers. If it fails, the next caller runs it again.

    The work is a separate task, so that cancelling one caller does not cancel it for the others.
    """
    task: asyncio.Task[T] | None = getattr(session, slot)
    if task is not None and task.done() and not task.cancelled() and task.exception() is None:
        return task.result()
    if task is None or task.done():
        task = asyncio.ensure_future(work())
        setattr(session, slot, task)
        session.keep(task)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)
