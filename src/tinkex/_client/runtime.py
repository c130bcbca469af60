"""One event loop in one daemon thread runs all work of the clients.

Callers on any thread, with or without an event loop, submit work through a mailbox. It wakes the loop once for all
waiting work, and results come back the same way. This makes thousands of small requests cheap.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextvars import Context
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from tinkex.errors import APITimeoutError, WrongThreadError

__all__ = [
    "APIFuture",
    "AwaitableConcurrentFuture",
    "Runtime",
    "SampleFuture",
    "TaskGroup",
    "await_many",
    "begin_anew_in_forks",
    "deliver_result",
    "fail",
    "leave_behind",
    "runtime",
]

#: Seconds that any callback of the loop takes at most.
_LONGEST_CALLBACK: Final = 2.0
#: Blocking waits wake up this often, in seconds: Python can miss a Ctrl-C that arrives just before a lock wait.
_NOTICE: Final = 1.0

T = TypeVar("T")


class _Mailbox:
    """Passes calls from other threads to one event loop and wakes it once for many of them."""

    __slots__ = ("_calls", "_lock", "_loop", "_woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # a strong reference would keep closed loops alive
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._woken = False

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Schedule `call(*args)` on the loop. Raises RuntimeError if the loop is closed."""
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        with self._lock:
            self._calls.append((call, args))
            if self._woken:
                return
            self._woken = True
        own = _shared.loop
        if own is not None and own is not loop and threading.get_ident() == _shared.thread_id:
            own.call_soon(self._wake)  # once for all results of this turn of our loop
        elif not self._wake():
            raise RuntimeError("the event loop is closed")

    def _wake(self) -> bool:
        """Wake the loop, which costs a system call. Returns False if it is closed: no task waits there."""
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
                return True
        except RuntimeError:
            pass
        with self._lock:
            self._calls.clear()
            self._woken = False
        return False

    def _deliver(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, deque()
            self._woken = False
        for call, args in calls:
            call(*args)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()
_mailboxes_lock = threading.Lock()


def _mailbox_of(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        with _mailboxes_lock:
            mailbox = _mailboxes.setdefault(loop, _Mailbox(loop))
    return mailbox


class _Itself:
    """A descriptor that returns the instance itself, unless the attribute is assigned."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance


class APIFuture(concurrent.futures.Future[T]):
    """A future result: block with `.result(timeout)`, or `await` it on any event loop.

    It is a `concurrent.futures.Future`, so `add_done_callback`, `as_completed` and `wait` work too.
    If a task that awaits it is cancelled, the operation continues. `cancel()` drops the result; an operation that is
    part of a sequence, such as a training step, still runs.
    """

    _cancel_with_waiter = False

    def __init__(self) -> None:
        super().__init__()
        self._process = _process

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result. Raises TimeoutError if it takes more than `timeout` seconds."""
        self._wait_attentively(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end. Returns the exception that `result` would raise, or None."""
        self._wait_attentively(timeout)
        return super().exception(timeout)

    def _wait_attentively(self, timeout: float | None) -> None:
        if self.done():
            return
        self._check_waiting_helps(blocking=True)
        if timeout is None:
            with self._condition:
                while not self.done():
                    self._condition.wait(_NOTICE)

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        with self._condition:
            if self._state == "CANCELLED":  # `wait` and `as_completed` ignore this state
                self.set_running_or_notify_cancel()
        return True

    def _check_waiting_helps(self, *, blocking: bool) -> None:
        if blocking and threading.get_ident() == _shared.thread_id and not self.done():
            raise WrongThreadError(
                "Blocking on a future on tinkex's own thread would deadlock; await the future, or call "
                "result() on another thread."
            )
        if self._process is not _process and not self.done():
            raise WrongThreadError(
                "This result belongs to the parent process, not to its fork; repeat the call in "
                "this process."
            )

    async def result_async(self, timeout: float | None = None) -> T:
        if timeout is None:
            return await _Arrival(self)
        async with asyncio.timeout(timeout):
            return await _Arrival(self)

    def future(self) -> concurrent.futures.Future[T]:
        return self

    _future = _Itself()

    def __await__(self) -> Generator[Any, None, T]:
        # The official class is abstract. Code that derives from it overrides `result_async`, does not
        # call our constructor, and expects `await` to use its `result_async`.
        if type(self).result_async is not APIFuture.result_async:
            return (yield from self.result_async().__await__())
        return (yield from _wait(self))


def _wait(future: APIFuture[T]) -> Generator[Any, None, T]:
    if not future.done():
        future._check_waiting_helps(blocking=False)
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        mailbox = _mailbox_of(loop)
        future.add_done_callback(lambda _: _post_quietly(mailbox, _wake, arrived))
        try:
            yield from arrived
        except asyncio.CancelledError:
            if future._cancel_with_waiter:
                future.cancel()
            raise
    try:
        return concurrent.futures.Future.result(future, 0)
    except concurrent.futures.CancelledError:
        raise asyncio.CancelledError from None


class _Arrival(Generic[T]):
    """Waits for a future, even if its class overrides `__await__`."""

    __slots__ = ("_awaited",)

    def __init__(self, awaited: APIFuture[T]) -> None:
        self._awaited = awaited

    def __await__(self) -> Generator[Any, None, T]:
        return _wait(self._awaited)


class AwaitableConcurrentFuture(APIFuture[T]):
    """Makes any `concurrent.futures.Future` awaitable. Cancelling one cancels both."""

    def __init__(self, future: concurrent.futures.Future[T]) -> None:
        super().__init__()
        self._future = future
        future.add_done_callback(self._follow)
        self.add_done_callback(lambda done: future.cancel() if done.cancelled() else None)

    def future(self) -> concurrent.futures.Future[T]:
        source: concurrent.futures.Future[T] = self._future
        return source

    def _follow(self, done: concurrent.futures.Future[T]) -> None:
        if done.cancelled():
            self.cancel()
        elif (error := done.exception()) is not None:
            fail(self, error)
        else:
            deliver_result(self, done.result())


class SampleFuture(APIFuture[T]):
    """A future whose work is cancelled with it, or with the task that awaits it."""

    _cancel_with_waiter = True


def await_many(
    futures: Iterable[concurrent.futures.Future[T]], timeout: float | None = None
) -> list[T | Exception]:
    """Wait for all futures and return, in the same order, the result or the error of each.

    Never raises for a failed call. A future that is not done `timeout` seconds after the call gives an
    `APITimeoutError` in the list; the operation itself continues. In async code use
    `asyncio.gather(*futures, return_exceptions=True)`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    outcomes: list[T | Exception] = []
    for future in futures:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            outcomes.append(future.result(left))
        except Exception as error:
            late = isinstance(error, TimeoutError) and not future.done()
            message = f"The operation did not complete within {timeout} s."
            outcomes.append(APITimeoutError(message=message) if late else error)
    return outcomes


def _wake(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


def _post_quietly(mailbox: _Mailbox, call: Callable[..., object], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # its loop is closed, so no task waits
        mailbox.post(call, *args)


class TaskGroup:
    """The tasks of one client, which are cancelled together when it is closed."""

    __slots__ = ("closed", "futures")

    def __init__(self) -> None:
        self.futures: dict[asyncio.Task[Any], APIFuture[Any]] = {}
        self.closed: BaseException | None = None

    def close(self, error: BaseException) -> None:
        """Fail all running and all later work with `error`."""
        self.closed = error
        for task, future in list(self.futures.items()):
            fail(future, error)
            task.cancel()


class Runtime:
    """The event loop and its thread, which starts with the first submitted work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mailbox: _Mailbox | None = None
        self._thread: threading.Thread | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread_id: int | None = None

    def submit(
        self,
        work: Coroutine[Any, Any, T],
        future: APIFuture[T],
        group: TaskGroup,
        context: Context | None = None,
    ) -> APIFuture[T]:
        """Run `work` on the loop and set its result or exception on the future."""
        mailbox = self._mailbox or self._ensure_started()
        mailbox.post(self._start, work, future, group, context)
        return future

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Schedule `call(*args)` on the loop."""
        mailbox = self._mailbox or self._ensure_started()
        mailbox.post(call, *args)

    def _start(
        self,
        work: Coroutine[Any, Any, T],
        future: APIFuture[T],
        group: TaskGroup,
        context: Context | None,
    ) -> None:
        if group.closed is not None:
            work.close()
            fail(future, group.closed)
            return
        assert self.loop is not None
        task = self.loop.create_task(work, context=context)
        group.futures[task] = future
        running = _Running(self, task, group)
        task.add_done_callback(running.deliver)
        if future._cancel_with_waiter:
            future.add_done_callback(running.give_up)

    def _ensure_started(self) -> _Mailbox:
        with self._lock:
            if self._mailbox is None:
                self.loop = self.loop or _new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self.loop,), name="tinkex", daemon=True
                )
                self._thread.start()
                self.thread_id = self._thread.ident
                self._mailbox = _mailbox_of(self.loop)
            return self._mailbox

    def stop(self) -> None:
        """Stop the loop and wait for its thread; the next work starts it again where it stopped."""
        with self._lock:
            thread, self._thread, self._mailbox = self._thread, None, None
            if thread is not None and self.loop is not None:
                self.loop.call_soon_threadsafe(self.loop.stop)
        if thread is not None:
            thread.join(_LONGEST_CALLBACK)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _Running:
    """A task on the loop. It knows the future only by its group: a reference would be a cycle."""

    __slots__ = ("_group", "_runtime", "_task")

    def __init__(self, runtime: Runtime, task: asyncio.Task[Any], group: TaskGroup) -> None:
        self._runtime, self._group = runtime, group
        self._task: asyncio.Task[Any] | None = task

    def deliver(self, task: asyncio.Task[Any]) -> None:
        """The task has ended: settle its future."""
        self._task = None  # the caller may keep the future for long
        future = self._group.futures.pop(task)
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            fail(future, error)
        else:
            deliver_result(future, task.result())

    def give_up(self, _: concurrent.futures.Future[Any]) -> None:
        """The future was cancelled or timed out: cancel a task that still runs."""
        task = self._task
        if task is not None and not task.done():
            self._runtime.post(task.cancel)


def deliver_result(future: APIFuture[T], result: T) -> None:
    """Set a result unless the future is already done."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled in the meantime
        future.set_result(result)


def fail(future: APIFuture[Any], error: BaseException) -> None:
    """Set an exception unless the future is already done."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        future.set_exception(error)


# -- forks ---------------------------------------------------------------------------------------
# A forked child inherits every object but none of the threads, and shares its sockets with the parent.


class _BeginsAnew(Protocol):
    def _begin_anew(self) -> None: ...


_process = object()  # identity of this process; replaced in a forked child
_affected: WeakSet[_BeginsAnew] = WeakSet()
_left_behind: list[object] = []


def begin_anew_in_forks(thing: _BeginsAnew) -> None:
    """Call `thing._begin_anew()` in every forked child while `thing` is alive. Holds no reference to it."""
    _affected.add(thing)


def leave_behind(*things: object) -> None:
    """Keep the parent's objects alive in a forked child: closing them would touch the parent's event loop."""
    _left_behind.extend(things)


def _after_fork() -> None:
    global _process, _mailboxes_lock, _shared  # noqa: PLW0603
    _process = object()
    _mailboxes_lock = threading.Lock()  # another thread may have held it
    leave_behind(_shared)
    _shared = Runtime()
    for thing in list(_affected):
        thing._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_shared = Runtime()


def runtime() -> Runtime:
    """The shared runtime of this process."""
    return _shared


@atexit.register
def _stop_at_exit() -> None:
    # A thread that is inside the loop's C code while the interpreter shuts down can crash the process.
    _shared.stop()
