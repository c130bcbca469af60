"""The service's side of the pipe: awaitable calls to the engine.

The engine runs in its own process or, for tests without a second process, in a thread; the pipe is the same. If the
process dies, calls in flight fail with `EngineDiedError`. The next `start` starts an engine that has no adapters loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from tinkex._python import PYTHON
from tinkex.engine.base_models import PreparedModel
from tinkex.engine.calls import AddSample, CallFrame, CancelSample, EngineCall, Reply, Token
from tinkex.engine.group_memory import GroupMemory
from tinkex.engine.interface import EngineDiedError, EngineStuckError, OnToken
from tinkex.engine.process import Ready, Setup, encode_frame, serve
from tinkex.engine.progress import SAMPLING, EngineProgress
from tinkex.engine.values import SampledResult, SampleJob
from tinkex.errors import ConfigError

from .processes import activity, how_it_ended
from .threads import in_new_thread
from .watch import Watch

__all__ = ["Launcher", "Worker"]

R = TypeVar("R")
#: Starts an engine elsewhere, at the other end of a pipe: the engine reads its `Setup` there, and closing the pipe ends it.
Launcher = Callable[[socket.socket, EngineProgress], Awaitable[None]]
logger = logging.getLogger("tinkex.server")

_LENGTH: Final = struct.Struct("<Q")
#: The work of an engine that is starting: it has a deadline, and is no call.
_STARTING: Final = SAMPLING


class Worker:
    """One engine at the other end of a pipe.

    `deadline` is the number of seconds that one step of its work, such as a micro-batch, may take before it is killed;
    while it starts, the number of seconds in which it computes, reads and writes nothing.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        name: str = "engine",
        in_process: bool = False,
        python: Path | None = None,
        launcher: Launcher | None = None,
        prepare: Callable[[], None] | None = None,
        deadline: float = inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        #: The number of deaths so far: an engine that is started again has an empty memory.
        self.life = 0
        self._setup = setup
        self._in_process = in_process
        self._python = python
        self._launcher = launcher
        #: Runs in a thread before each start.
        self._prepare = prepare
        self._clock = clock
        self.watch = Watch(deadline)
        self._watching: asyncio.Task[None] | None = None
        self._timed: set[int] = set()  # calls in flight that have a deadline
        self._progress = EngineProgress.alone()
        self._stuck_in: int | None = None  # the call that the engine was killed for
        #: The life that began last. While the engine is started again it is the one before `life`.
        self._began = 0
        #: How the last life ended, behind the engine's name; known once it is stopped.
        self.ending = ""
        self._stuck = False
        self._process: subprocess.Popen[bytes] | None = None
        #: Shared memory of an engine that starts processes itself.
        self._memory: GroupMemory | None = None
        self._thread: threading.Thread | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._on_token: dict[int, OnToken] = {}
        self._last_id = 0
        self.ready: Ready | None = None
        #: Seconds the engine has worked on queued calls.
        self.busy_seconds = 0.0
        self.died = asyncio.Event()

    # -- start and stop ----------------------------------------------------------------------

    async def start(self) -> Ready:
        """Start the engine and wait until its base models are in memory."""
        if self._prepare is not None:
            await in_new_thread(self._prepare)
        try:
            return await self._start()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                reason = "the service may not open more files for its engines; raise `ulimit -n`, or start fewer"
                raise ConfigError(reason, field="engines") from None
            raise

    async def _start(self) -> Ready:
        ours, theirs = socket.socketpair()
        self._progress = progress = (
            EngineProgress.alone() if self._in_process else EngineProgress.shared()
        )
        with theirs:
            if self._launcher is not None:
                try:
                    await self._launcher(theirs, progress)
                except BaseException:
                    ours.close()
                    progress.close()
                    raise
            elif self._in_process:
                self._thread = threading.Thread(
                    target=serve, args=(theirs.dup(),), name="tinkex-engine", daemon=True
                )
                self._thread.start()
            else:
                # Start it from the event loop's thread: the kernel kills the engine when its parent thread ends.
                passed = theirs.fileno(), progress.fileno()
                try:
                    self._process = subprocess.Popen(  # noqa: ASYNC220, S603 - our own module, started at once
                        [*_command(self._python), *map(str, (*passed, os.getpid()))],
                        pass_fds=passed,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        start_new_session=True,  # signals from the terminal go only to the service
                    )
                except BaseException:
                    ours.close()
                    raise
        self._stuck = False
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode_frame(self._setup))
        watching = asyncio.create_task(self._watch_start())
        try:
            ready = await _frame(reader)
        finally:
            watching.cancel()
        if ready is None:
            await self.stop()
            raise self._not_started()
        if ready.error is not None:
            await self.stop()
            raise ready.error
        self.ready = ready
        self._began = self.life
        self.watch = Watch(self.watch.deadline)
        if self._process is not None and self._python is not None:
            self._memory = GroupMemory(self._process.pid)
            await in_new_thread(self._memory.look)
        self.died.clear()
        self._stuck_in = None
        self._reading = asyncio.create_task(self._read(reader))
        if not self._in_process:  # a thread cannot be killed
            self._watching = asyncio.create_task(self._watch(progress))
        return self.ready

    async def _watch_start(self) -> None:
        """Kill a process that does nothing while it should start. It may download a model: that is not nothing."""
        watch = Watch(self.watch.deadline)
        while self._process is not None:
            done = await in_new_thread(activity, self._process.pid)
            if done is None:  # it has ended, or this system does not tell
                return
            if watch.look((done, _STARTING), waiting=True, now=self._clock()):
                self._kill()
                return
            await asyncio.sleep(watch.interval)

    def _not_started(self) -> ConfigError:
        """Why there is no engine, for a process that ended before it was ready."""
        if self._python is not None and not self._stuck:
            return ConfigError(
                f"{self._python} ended before its engine was ready; its error output, if any, is above. Is it a "
                "Python, and at least as new as this one?",
                field="sampler_python",
            )
        advice = "" if self._stuck else "; fewer --engines and smaller base models need less memory"
        return ConfigError(
            f"{self.name} {self.ending} while it was starting. Its error output, if any, is above{advice}."
        )

    async def _watch(self, progress: EngineProgress) -> None:
        """Kill the engine when it makes no progress within its deadline."""
        watch = self.watch
        while True:
            await asyncio.sleep(watch.interval)
            seen = progress.read()
            if watch.look(seen, waiting=bool(self._timed), now=self._clock()):
                break
        self._stuck_in = seen[1] if seen[1] > 0 else None
        self._kill()

    def _kill(self) -> None:
        logger.error(
            "%s has made no progress for %.0f seconds (engine_deadline); killing it.",
            self.name,
            self.watch.deadline,
        )
        self._stuck = True
        if self._process is not None:
            self._process.kill()
        elif self._writer is not None:
            self._writer.close()

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
            await in_new_thread(self._thread.join)
            self._thread = None
        self.ending = how_it_ended(None)
        if self._process is not None:
            process = self._process
            try:
                await in_new_thread(process.wait, 10)
            except subprocess.TimeoutExpired:
                process.kill()
                await in_new_thread(process.wait)
            self.ending = how_it_ended(process.returncode)
            with contextlib.suppress(ProcessLookupError):  # processes that the engine has started
                os.killpg(process.pid, signal.SIGKILL)
            if self._memory is not None:
                self._memory.remove()
            self._process = None  # only now: if `stop` is cancelled above, the next one must still find the process
        if self._stuck:
            self.ending = f"made no progress for {self.watch.deadline:.0f} seconds and was killed"
        self._fail_calls("The service is stopping.")

    def also_serve(self, base_model: str) -> None:
        """Load this base model too the next time the engine starts."""
        names = [*self._setup.base_models, base_model]
        self._setup = replace(self._setup, base_models=names)

    def also_prepared(self, models: Sequence[PreparedModel]) -> None:
        """Tell the engine of base models that another engine has prepared on disk, before it starts."""
        self._setup = replace(self._setup, prepared=models)

    @property
    def kind(self) -> str:
        return self._setup.engine

    @property
    def busy(self) -> bool:
        """Whether a call is in flight."""
        return bool(self._calls)

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None if it runs in a thread or not at all."""
        return None if self._process is None else self._process.pid

    @property
    def memory(self) -> int | None:
        """Bytes of memory of the engine, if its process is on another machine."""
        return None if self._launcher is None else self._progress.memory or None

    # -- calls -------------------------------------------------------------------------------

    async def call(self, call: EngineCall[R]) -> R:
        """Send a call to the engine and wait for its reply."""
        return cast("R", await self._send(CallFrame(self._next_id(), call)))

    async def sample(self, job: SampleJob, on_token: OnToken | None = None) -> SampledResult:
        """Add a job to the batch and wait for all of its sequences; cancelling this call cancels the job."""
        call_id = self._next_id()
        if on_token is not None:
            self._on_token[call_id] = on_token
        try:
            return cast("SampledResult", await self._send(CallFrame(call_id, AddSample(job))))
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDiedError):  # its death has cancelled everything
                self._write(CallFrame(self._next_id(), CancelSample(call_id)))
            raise
        finally:
            self._on_token.pop(call_id, None)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def _send(self, frame: CallFrame) -> object:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._calls[frame.call_id] = future
        if frame.call.timed:
            self._timed.add(frame.call_id)
        try:
            self._write(frame)
            return await future
        finally:
            self._calls.pop(frame.call_id, None)
            self._timed.discard(frame.call_id)

    def _write(self, frame: CallFrame) -> None:
        if self._writer is None or self._reading is None or self._reading.done():
            raise self._death("The engine is not running.")
        self._writer.write(encode_frame(frame))

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
                stuck = EngineStuckError(
                    why, engine=self.name, life=self._began, deadline=self.watch.deadline
                )
                future.set_exception(stuck)
            else:
                future.set_exception(self._death(why, cause_known=cause is not None))

    def _death(self, why: str, *, cause_known: bool = False) -> EngineDiedError:
        return EngineDiedError(why, engine=self.name, life=self._began, cause_known=cause_known)


#: Runs the engine in another Python. Only this package is made importable there, by its file: the directory that
#: holds it may hold packages of other versions.
_ELSEWHERE: Final = """
import importlib.util, sys
from pathlib import Path
file = sys.argv.pop(1)
found = importlib.util.spec_from_file_location("tinkex", file, submodule_search_locations=[str(Path(file).parent)])
sys.modules["tinkex"] = importlib.util.module_from_spec(found)
found.loader.exec_module(sys.modules["tinkex"])
from tinkex.engine.process import main
main(has_children=True)
"""


def _command(python: Path | None) -> list[str]:
    """How an engine is started: by this interpreter, or by one that has packages of its own."""
    if python is None:
        return [*PYTHON, "-m", "tinkex.engine"]
    return [str(python), "-P", "-c", _ELSEWHERE, str(Path(__file__).parent.parent / "__init__.py")]


async def _frame(reader: asyncio.StreamReader) -> Any:
    """The next frame; None if the other end has closed."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        data = await reader.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return pickle.loads(data)  # noqa: S301 - our own child wrote it
