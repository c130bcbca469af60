"""The engine process: receives calls over a pipe, sends replies, and divides time between training and sampling.

    python -m tinkex.engine SOCKET [PROGRESS PARENT]

The service starts this command with the descriptors of a socket and of the shared progress memory, and its own
process id. It sends a `Setup`; the engine answers with `Ready` once the base models are in memory. A frame is a pickle
with its length before it. Both ends are the same program, started by the same user, so nothing untrusted is
unpickled. When the service ends, its engine ends too, even if the engine's interpreter is stuck.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self, cast

from tinkex.errors import ConfigError, TinkerError

from . import base_models
from .base_models import PreparedModel
from .calls import (
    AddBaseModel,
    AddSample,
    CallFrame,
    CancelSample,
    DirectCall,
    Engine,
    PassCall,
    Reply,
    TakeSnapshot,
    Token,
)
from .checks import lacks_memory
from .ending import be_killed_first, die_with
from .group_memory import GroupMemory
from .interface import EngineFailedError
from .parcels import Depot, ParcelLostError
from .progress import SAMPLING, UNTIMED, EngineProgress
from .resident import return_memory
from .shared_memory import SharedMemory
from .values import LossLimits, SampleEvent, SampleJob, VllmOptions

__all__ = ["Inbox", "Loop", "Ready", "Setup", "encode_frame", "main", "read_frame", "serve", "work"]

_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of the engine; base models have the form of the option `--base-model`."""

    base_models: Sequence[str]
    cache_dir: Path
    engine: Literal["torch", "fake", "vllm"] = "torch"
    device: str = "auto"
    dtype: str = "auto"
    loss_limits: LossLimits = field(default_factory=LossLimits)
    #: Threads on a CPU; None leaves the choice to torch.
    threads: int | None = None
    #: The part of its device's memory that an engine counts on. None: the part of the machine's processors that it has.
    memory_share: float | None = 1.0
    #: Where the engines of a pool exchange adapters and gradients.
    depot: Path | None = None
    #: Base models that another engine has prepared on disk.
    prepared: Sequence[PreparedModel] = ()
    vllm: VllmOptions = field(default_factory=VllmOptions)


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is ready, or `error` says why it cannot start."""

    models: Sequence[PreparedModel] = ()
    device: str = "cpu"
    dtype: str = "float32"
    #: Token budget of one micro-batch; 0 if the engine always computes a whole pass.
    token_budget: int = 0
    #: What computes between the matrix products: `native` or `torch`.
    kernels: str = "torch"
    error: Exception | None = None
    #: The machine, if the engine may be on another than the service.
    node: str = ""


class Inbox(Protocol):
    """Source of calls. `get` returns None at the end.

    It raises `queue.Empty` if no call comes within `timeout` seconds, or at once if `block` is false.
    """

    def get(self, *, block: bool, timeout: float | None = None) -> CallFrame | Reply | None: ...
    def put(self, message: CallFrame | Reply | None) -> None: ...
    def empty(self) -> bool: ...


Send = Callable[[list[Reply | Token]], None]


class Loop:
    """Takes calls from an inbox, runs them on the engine, and sends the replies."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        send: Send,
        prepare: Callable[[str], PreparedModel],
        clock: Callable[[], float] = time.perf_counter,
        progress: EngineProgress | None = None,
        rest: Callable[[], None] = return_memory,
        rest_after: float = 1.0,
    ) -> None:
        self._engine, self._inbox, self._send, self._clock = engine, inbox, send, clock
        self._rest, self._rest_after, self._rested = rest, rest_after, False
        self._progress = progress or EngineProgress.alone()
        self._prepare = prepare
        self._line: deque[CallFrame] = deque()
        self._pass: tuple[int, Generator[None, None, object], float] | None = None
        self._samples: set[int] = set()
        self._out: list[Reply | Token] = []

    def run(self) -> None:
        """Run until the inbox returns None."""
        while self._receive():
            spent = self._advance_line()
            self._sample_for(spent)
            self._flush()

    @property
    def _idle(self) -> bool:
        return not (self._line or self._pass or self._engine.sampling)

    def _receive(self) -> bool:
        """Accept all calls that have arrived; block for one if the engine is idle. False at the end.

        An engine that has been idle for a while after some work returns the memory that the work needed to the system.
        """
        block = self._idle
        while True:
            try:
                timeout = None if self._rested else self._rest_after
                call = self._inbox.get(block=block, timeout=timeout)
            except queue.Empty:
                if not block:
                    return True
                self._rest()
                self._rested = True
                continue
            if call is None:
                return False
            self._accept(call)
            block = self._rested = False

    def _accept(self, message: CallFrame | Reply) -> None:
        if isinstance(message, Reply):  # from a thread that wrote a snapshot
            self._out.append(message)
            return
        match message.call:
            case AddSample(job):
                self._add_sample(message.call_id, job)
            case CancelSample(call_id):
                self._samples.discard(call_id)
                self._engine.cancel_sample(str(call_id))
            case call if call.lane == "now":
                self._run(message)
            case _:
                self._line.append(message)

    def _advance_line(self) -> float:
        """Run one micro-batch of the current pass, or the next call of the queue; return the seconds it took."""
        if self._pass is None and not self._line:
            return 0.0
        started = self._clock()
        if self._pass is None:
            frame = self._line.popleft()
            if not isinstance(frame.call, PassCall):
                self._run(frame)
                return self._clock() - started
            self._progress.begin(frame.call_id)
            try:
                self._pass = (frame.call_id, frame.call.begin(self._engine), 0.0)
            except Exception as error:
                self._out.append(Reply(frame.call_id, error=_portable(error)))
                return self._clock() - started
        call_id, pieces, worked = self._pass
        reply: Reply | None = None
        self._progress.begin(call_id)
        try:
            next(pieces)
        except StopIteration as finished:
            reply = Reply(call_id, finished.value)
        except Exception as error:
            reply = Reply(call_id, error=_portable(error))
        self._progress.end()
        spent = self._clock() - started
        if reply is None:
            self._pass = (call_id, pieces, worked + spent)
        else:
            self._pass = None
            self._out.append(Reply(reply.call_id, reply.value, reply.error, worked + spent))
        return spent

    def _sample_for(self, seconds: float) -> None:
        """Sample for as many seconds as training just took, at least one step, so that both get half the time."""
        until = self._clock() + seconds
        while self._engine.sampling:
            self._flush()  # a later failure must not lose finished replies
            self._progress.begin(SAMPLING)
            events = self._engine.sample_step()
            self._progress.end()
            for event in events:
                self._report(event)
            if self._clock() >= until:
                return
            if not self._inbox.empty() and not self._receive():
                self._inbox.put(None)
                return

    def _add_sample(self, call_id: int, job: SampleJob) -> None:
        try:
            self._engine.add_sample(str(call_id), job)
            self._samples.add(call_id)
        except Exception as error:
            self._out.append(Reply(call_id, error=_portable(error)))

    def _report(self, event: SampleEvent) -> None:
        call_id = int(event.job_id)
        if call_id not in self._samples:
            return
        if event.token is not None and event.logprob is not None:
            self._out.append(
                Token(event.index, event.token, event.logprob, event.topk, call_id=call_id)
            )
            return
        self._samples.discard(call_id)
        error = None if event.error is None else _portable(event.error)
        self._out.append(Reply(call_id, event.result, error))

    def _run(self, frame: CallFrame) -> None:
        call, started = frame.call, self._clock()
        self._progress.begin(UNTIMED if isinstance(call, AddBaseModel) else frame.call_id)
        try:
            match call:
                case AddBaseModel(name):
                    value: object = self._add_model(name)
                case TakeSnapshot():
                    write = call.copy(self._engine)
                    threading.Thread(target=self._write, args=(frame.call_id, write)).start()
                    return
                case DirectCall():
                    value = call.run(self._engine)
                case _:
                    raise TypeError(f"no engine runs {call!r:.200}")
        except Exception as error:
            self._out.append(Reply(frame.call_id, error=_portable(error)))
            return
        finally:
            self._progress.end()
        self._out.append(Reply(frame.call_id, value, seconds=self._clock() - started))

    def _write(self, call_id: int, write: Callable[[], int]) -> None:
        """Write a snapshot in a thread while the engine works; its weights are already copied."""
        try:
            reply = Reply(call_id, write())
        except Exception as error:
            reply = Reply(call_id, error=_portable(error))
        self._inbox.put(reply)

    def _add_model(self, name: str) -> PreparedModel:
        model = self._prepare(name)
        self._engine.load(model)
        return model

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._send(out)


def _portable(error: Exception) -> Exception:
    """An error that can be pickled: errors that callers distinguish stay as they are, others keep name and message."""
    if isinstance(error, TinkerError | ParcelLostError):
        return error
    found = "".join(traceback.format_exception(error))
    if not (isinstance(error, OSError | MemoryError) and type(error).__module__ == "builtins"):
        if lacks_memory(error):
            error = MemoryError(str(error))
        else:
            kind = type(error).__name__
            error = EngineFailedError(f"{kind}: {error}", kind)
    error.add_note(f"In the engine:\n{found}")  # a pickle has no traceback
    return error


# -- the pipe ------------------------------------------------------------------------------------


def encode_frame(value: object) -> bytes:
    data = pickle.dumps(value, protocol=5)
    return _LENGTH.pack(len(data)) + data


def read_frame(connection: socket.socket) -> Any:
    """Read the next frame; None when the other end has closed the pipe."""
    header = _read_exactly(connection, _LENGTH.size)
    if header is None:
        return None
    data = _read_exactly(connection, _LENGTH.unpack(header)[0])
    return None if data is None else pickle.loads(data)  # noqa: S301 - our own parent wrote it


def _read_exactly(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = connection.recv_into(view)
        except OSError:
            return None
        if not count:
            return None
        view = view[count:]
    return data


def serve(
    connection: socket.socket,
    *,
    alone: bool = False,
    progress: EngineProgress | None = None,
    memory: GroupMemory | None = None,
) -> None:
    """Run an engine at the end of a pipe, until the other end closes.

    `alone` means that this process does nothing else, so it may exit in the middle of a computation. `memory` is that
    of the processes that the engine starts.
    """

    def send(value: object) -> None:
        if memory is not None and isinstance(value, Ready):
            memory.look()
        connection.sendall(encode_frame(value))

    with connection:
        setup = read_frame(connection)
        if not isinstance(setup, Setup):
            return
        if alone:
            watch = threading.Thread(target=_leave_with, args=(connection, memory), daemon=True)
            watch.start()
        with _Pipe(connection) as inbox, contextlib.suppress(ConnectionError):
            work(setup, inbox, send, progress)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _leave_with(connection: socket.socket, memory: GroupMemory | None) -> None:
    """Exit when the other end of the pipe closes: no one waits for the current computation."""
    watch = select.poll()
    watch.register(connection, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    watch.poll()
    _end_group(memory)
    os._exit(0)


def _end_group(memory: GroupMemory | None) -> None:
    """Kill this process with those that it has started, and remove their shared memory."""
    if memory is not None:
        memory.remove()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


class _Pipe:
    """Reads calls directly from the pipe: a reader thread would cost one more wake-up for each call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        self._closed = False
        self._beside: deque[CallFrame | Reply | None] = deque()
        self._woken, self._wake = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._woken.close()
        self._wake.close()

    def put(self, message: CallFrame | Reply | None) -> None:
        """Add a message from another thread."""
        self._beside.append(message)
        with contextlib.suppress(OSError):  # the loop has ended
            self._wake.send(b"!")

    def empty(self) -> bool:
        return not (self._beside or self._whole_frame() or self._poll.poll(0))

    def get(self, *, block: bool, timeout: float | None = None) -> CallFrame | Reply | None:
        """Return the next message; None when the other end has closed the pipe."""
        milliseconds = 0 if not block else None if timeout is None else timeout * 1000
        while True:
            if self._beside:
                self._woken.recv(1)
                return self._beside.popleft()
            if size := self._whole_frame():
                frame = pickle.loads(self._received[_LENGTH.size : size])  # noqa: S301 - our parent's
                del self._received[:size]
                return cast("CallFrame", frame)
            if self._closed:
                return None
            ready = self._poll.poll(milliseconds)
            if not ready:
                raise queue.Empty
            if any(descriptor == self._connection.fileno() for descriptor, _ in ready):
                self._receive()

    def _whole_frame(self) -> int:
        """End of the first frame in the buffer; 0 if the frame is not complete yet."""
        if len(self._received) < _LENGTH.size:
            return 0
        end = _LENGTH.size + int(_LENGTH.unpack_from(self._received)[0])
        return end if len(self._received) >= end else 0

    def _receive(self) -> None:
        try:
            part = self._connection.recv(1 << 20)
        except ConnectionError:
            part = b""
        if part:
            self._received += part
        else:
            self._closed = True


def work(
    setup: Setup,
    inbox: Inbox,
    send: Callable[[object], None],
    progress: EngineProgress | None,
    depot: Depot | None = None,
) -> None:
    """Make an engine, send `Ready`, and run its loop until the inbox ends; each later message is a list."""
    with _depot(setup) as own:
        try:
            engine, ready = _set_up(setup, own or depot)
        except Exception as error:
            send(Ready(error=_portable(error)))
            return
        send(ready)
        Loop(engine, inbox, send, partial(_prepare, setup), progress=progress).run()


@contextlib.contextmanager
def _depot(setup: Setup) -> Generator[Depot | None]:
    """What this engine puts into its pool's exchange; also removes what engines that have died left there."""
    if setup.depot is None:
        yield None
        return
    own = SharedMemory(setup.depot)
    own.keep()
    try:
        yield own
    finally:
        own.close()


def _set_up(setup: Setup, depot: Depot | None) -> tuple[Engine, Ready]:
    models = [_prepare(setup, text) for text in setup.base_models]
    if setup.engine == "fake":
        from .fake import FakeEngine

        return FakeEngine(models, detokenize=_Detokenizer()), Ready(models, "none", "float32")
    if setup.engine == "vllm":
        return _set_up_vllm(setup, models)
    import torch

    from .devices import device_for
    from .engine import TorchEngine
    from .shared_weights import SharedWeights

    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    device = device_for(setup.device)
    _check_gpu(device, torch.cuda.device_count())
    shared = None
    if setup.depot is not None and device == "cpu" and hasattr(os, "posix_fallocate"):
        shared = SharedWeights(setup.depot)
    engine = TorchEngine(
        models,
        device=device,
        dtype=setup.dtype,
        detokenize=_Detokenizer(),
        loss_limits=setup.loss_limits,
        memory_share=_memory_share(setup),
        depot=depot,
        shared_weights=shared,
    )
    for model in models:
        engine.load(model)
    return engine, Ready(models, device, engine.dtypes, engine.token_budget, kernels=engine.kernels)


def _memory_share(setup: Setup) -> float:
    if setup.memory_share is not None:
        return setup.memory_share
    return min(1.0, (setup.threads or 1) / (os.cpu_count() or 1))


def _check_gpu(device: str, count: int) -> None:
    """Refuse a GPU that is not there, instead of torch's error at the first allocation."""
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= count:
        raise ConfigError(
            f"{device} is not there: torch finds {count} CUDA devices on this machine. Is the driver installed, and "
            "is this torch built for CUDA? CUDA_VISIBLE_DEVICES hides devices too",
            field="device",
        )


def _set_up_vllm(setup: Setup, models: Sequence[PreparedModel]) -> tuple[Engine, Ready]:
    from .vllm_engine import VllmEngine

    if len(models) != 1:
        raise ConfigError("vLLM serves one base model; give one --base-model", field="sampler")
    device, dtype = setup.device.partition(":")[0], setup.dtype
    if "auto" in {device, dtype}:
        from .devices import device_for, has_bfloat16

        device = device_for(device)
        if dtype == "auto":  # as the trainer, so that their logprobs agree
            dtype = "bfloat16" if has_bfloat16(device) else "float32"
    return VllmEngine(models[0], dtype, setup.vllm), Ready(models, device, dtype)


def _prepare(setup: Setup, text: str) -> PreparedModel:
    for model in setup.prepared:
        if model.name == base_models.parse_spec(text).name:
            return model
    return base_models.prepare(base_models.parse_spec(text), setup.cache_dir, progress=_tell)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - progress of a long start


class _Detokenizer:
    """Decodes token ids, to find stop strings; reads a tokenizer when it is first needed."""

    def __init__(self) -> None:
        self._tokenizers: dict[Path, Any] = {}

    def __call__(self, model: PreparedModel, ids: Sequence[int]) -> str:
        if model.directory not in self._tokenizers:
            self._tokenizers[model.directory] = _tokenizer(model.directory)
        text: str = self._tokenizers[model.directory].decode(list(ids), skip_special_tokens=False)
        return text


def _tokenizer(directory: Path) -> Any:
    fast = directory / "tokenizer.json"
    if fast.is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(fast))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


def main(*, has_children: bool = False) -> None:
    """Run the engine that the arguments describe; `has_children` if it starts processes that must end with it."""
    # The service handles Ctrl-C and then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, *watched = map(int, sys.argv[1:])
    progress = None
    if watched:
        progress = EngineProgress.of_descriptor(watched[0])
        if (
            not has_children
        ):  # the kernel would kill only this process; the thread that watches the pipe kills all
            die_with(watched[1])
        be_killed_first()
    memory = GroupMemory(os.getpgrp()) if has_children else None
    serve(socket.socket(fileno=descriptor), alone=True, progress=progress, memory=memory)
    if memory is not None:
        _end_group(memory)
