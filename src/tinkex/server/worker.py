"""The service's side of the pipe: calls of the engine that can be awaited.

The engine runs in a process of its own, or, for tests that want no second process, in a thread; the pipe between is
the same. A death of the process fails the calls that were under way with `EngineDiedError`; the next `start` begins anew
with an engine that knows no models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, Final, cast

from tinkex.engine.process import Call, Lane, Ready, Reply, Setup, Token, encode_frame, serve
from tinkex.engine.progress import Progress
from tinkex.engine.values import SampledResult, SampleJob

from .watch import Watch

__all__ = ["EngineDiedError", "EngineStuckError", "Worker"]

logger = logging.getLogger("tinkex.server")

_LENGTH: Final = struct.Struct("<Q")


#: Calls that may take any time, or are answered by a thread beside the engine's own.
_UNTIMED: Final = frozenset({"add_base_model", "snapshot"})


class EngineDiedError(Exception):
    """The engine's process ended while it was needed; `cause_known` says that another call was the cause."""

    def __init__(self, message: str, *, cause_known: bool = False) -> None:
        super().__init__(message)
        self.cause_known = cause_known


class EngineStuckError(EngineDiedError):
    """The engine was killed because it did not get on with this very call."""


class Worker:
    """One engine at the other end of a pipe.

    `deadline` is how many seconds it may take for one piece of its work, such as a micro-batch, before it is killed.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        in_process: bool = False,
        deadline: float = inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._setup = setup
        self._in_process = in_process
        self._clock = clock
        self.watch = Watch(deadline)
        self._watching: asyncio.Task[None] | None = None
        self._timed: set[int] = set()  # calls that are under way and have a deadline
        self._progress = Progress.alone()
        self._stuck_in: int | None = None  # the call that the engine was killed for
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._on_token: dict[int, Callable[[Token], None]] = {}
        self._last_id = 0
        self.ready: Ready | None = None
        #: Seconds the engine has worked on calls in line.
        self.busy_seconds = 0.0
        self.died = asyncio.Event()

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Start the engine and wait until its base models are in memory."""
        ours, theirs = socket.socketpair()
        self._progress = progress = Progress.alone() if self._in_process else Progress.shared()
        with theirs:
            if self._in_process:
                self._thread = threading.Thread(
                    target=serve, args=(theirs.dup(),), name="tinkex-engine", daemon=True
                )
                self._thread.start()
            else:
                # Started from the thread of the event loop: the engine is killed when this thread ends.
                passed = theirs.fileno(), progress.fileno()
                self._process = subprocess.Popen(  # noqa: ASYNC220, S603 - our own module, started at once
                    [sys.executable, "-m", "tinkex.engine", *map(str, (*passed, os.getpid()))],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # signals of the terminal are for the service
                )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode_frame(self._setup))
        ready = await _frame(reader)
        if ready is None:
            await self.stop()
            raise EngineDiedError(
                "The engine ended while it was starting; its last words are above."
            )
        if ready.error is not None:
            await self.stop()
            raise ready.error
        self.ready = ready
        self.died.clear()
        self._stuck_in = None
        self._reading = asyncio.create_task(self._read(reader))
        if self._process is not None:  # a thread cannot be killed
            self._watching = asyncio.create_task(self._watch(self._process, progress))
        return self.ready

    async def _watch(self, process: subprocess.Popen[bytes], progress: Progress) -> None:
        """Kill the engine when it does not get on with its work."""
        self.watch = watch = Watch(self.watch.deadline)
        while True:
            await asyncio.sleep(watch.interval)
            seen = progress.read()
            if watch.look(seen, waiting=bool(self._timed), now=self._clock()):
                break
        self._stuck_in = seen[1] if seen[1] > 0 else None
        logger.error(
            "The engine has made no progress for %.0f seconds (engine_deadline); killing it.",
            watch.deadline,
        )
        process.kill()

    async def stop(self) -> None:
        for task in (self._watching, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._watching = self._reading = None
        self._progress.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        if self._process is not None:
            process, self._process = self._process, None
            try:
                await asyncio.to_thread(process.wait, 10)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        self._fail_calls("The service is stopping.")

    def also_serve(self, base_model: str) -> None:
        """Have a base model from the beginning in the engine's next life."""
        names = [*self._setup.base_models, base_model]
        self._setup = replace(self._setup, base_models=names)

    @property
    def busy(self) -> bool:
        """Whether anybody waits for an answer."""
        return bool(self._calls)

    @property
    def pid(self) -> int | None:
        """The engine's process, if it has one of its own."""
        return None if self._process is None else self._process.pid

    # -- calls -------------------------------------------------------------------------------

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call the engine in line: after what is in line already."""
        return await self._sent(method, args, options, "line")

    async def call_now(self, method: str, *args: Any, **options: Any) -> Any:
        """Call the engine for something quick, between two pieces of its work."""
        return await self._sent(method, args, options, "now")

    async def sample(
        self, job: SampleJob, on_token: Callable[[Token], None] | None = None
    ) -> SampledResult:
        """Put a job into the batch and wait for all of its sequences; leaving early cancels it."""
        call_id = self._next_id()
        if on_token is not None:
            self._on_token[call_id] = on_token
        drawing = Call(call_id, "sample", (job,), lane="sample")
        try:
            return cast("SampledResult", await self._send(drawing))
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDiedError):  # which has cancelled everything
                self._write(Call(self._next_id(), "cancel_sample", (call_id,), lane="now"))
            raise
        finally:
            self._on_token.pop(call_id, None)

    async def _sent(
        self, method: str, args: tuple[Any, ...], options: dict[str, Any], lane: Lane
    ) -> Any:
        return await self._send(Call(self._next_id(), method, args, options, lane))

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def _send(self, call: Call) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = future
        if call.method not in _UNTIMED:
            self._timed.add(call.call_id)
        try:
            self._write(call)
            return await future
        finally:
            self._calls.pop(call.call_id, None)
            self._timed.discard(call.call_id)

    def _write(self, call: Call) -> None:
        if self._writer is None or self._reading is None or self._reading.done():
            raise EngineDiedError("The engine is not running.")
        self._writer.write(encode_frame(call))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (messages := await _frame(reader)) is not None:
                for message in messages:
                    self._deliver(message)
        finally:
            self._fail_calls("The engine's process ended.")
            self.died.set()

    def _deliver(self, message: Reply | Token) -> None:
        if isinstance(message, Token):
            if (on_token := self._on_token.get(message.call_id)) is not None:
                on_token(message)
            return
        self.busy_seconds += message.seconds
        future = self._calls.get(message.call_id)
        if future is None or future.done():
            return
        if message.error is None:
            future.set_result(message.value)
        else:
            future.set_exception(message.error)

    def _fail_calls(self, why: str) -> None:
        cause = self._stuck_in
        for call_id, future in self._calls.items():
            if future.done():
                continue
            if call_id == cause:
                future.set_exception(EngineStuckError(why))
            else:
                future.set_exception(EngineDiedError(why, cause_known=cause is not None))


async def _frame(reader: asyncio.StreamReader) -> Any:
    """The next frame; None when the other end is gone."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        data = await reader.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return pickle.loads(data)  # noqa: S301 - our own child wrote it
