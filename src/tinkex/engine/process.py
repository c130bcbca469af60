"""The engine's side of the pipe: calls come in, values go out, and training and sampling share the processor.

    python -m tinkex.engine SOCKET [PROGRESS PARENT]

is what the service starts, with the descriptors of a socket and of the memory for its progress, and the service's own
process id. The other end of the socket speaks first: a `Setup`, answered by `Ready` once the base models are in
memory. Frames are pickles with their length before them; both ends are the same program, started by the same user, so
nothing untrusted is ever unpickled. When the service ends, so does its engine, even if its interpreter is stuck.
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
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self, cast

from tinkex.errors import TinkerError

from . import base_models
from .base_models import BaseModel
from .ending import be_killed_first, die_with
from .progress import SAMPLING, UNTIMED, Progress
from .values import (
    AdamStep,
    LoraSpec,
    LossLimits,
    PassResult,
    SampleEvent,
    SampleJob,
    TracedGraph,
    TrainingPass,
)

__all__ = ["Call", "Engine", "Ready", "Reply", "Setup", "Token", "encode_frame", "main", "serve"]

_LENGTH: Final = struct.Struct("<Q")

Lane = Literal["line", "now", "sample"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What the engine shall serve; sources are as `--base-model` gives them."""

    base_models: Sequence[str]
    cache_dir: Path
    engine: Literal["torch", "fake"] = "torch"
    device: str = "auto"
    dtype: str = "auto"
    loss_limits: LossLimits = field(default_factory=LossLimits)


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can work; or it cannot, and says why."""

    models: Sequence[BaseModel] = ()
    device: str = "cpu"
    dtype: str = "float32"
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the engine to call.

    Calls of the `line` run one after another. `now` is for what is quick and need not wait for training: it runs
    between two pieces of a pass. A `sample` is a job that joins the batch.
    """

    call_id: int
    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    lane: Lane = "line"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call returned or raised, and how long the engine worked on it."""

    call_id: int
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a streamed sample."""

    call_id: int
    index: int
    token: int
    logprob: float


class Engine(Protocol):
    """What a service can ask of an engine."""

    def load(self, model: BaseModel) -> None: ...
    def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> None: ...
    def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> None: ...
    def restore_snapshot(self, model_id: str, base_model: str, directory: Path) -> None: ...
    def unload_model(self, model_id: str) -> None: ...
    def run_pass(
        self, model_id: str, request: TrainingPass
    ) -> Generator[None, None, PassResult]: ...
    def check_traced(self, graph: TracedGraph) -> None: ...
    def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]: ...
    def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int: ...
    def snapshot(self, model_id: str, directory: Path) -> Callable[[], int]: ...
    def open_sampler(
        self,
        sampler_id: str,
        base_model: str,
        *,
        model_id: str | None = None,
        directory: Path | None = None,
    ) -> None: ...
    def close_sampler(self, sampler_id: str) -> None: ...
    def add_sample(self, job_id: str, job: SampleJob) -> None: ...
    def cancel_sample(self, job_id: str) -> None: ...
    @property
    def sampling(self) -> bool: ...
    def sample_step(self) -> list[SampleEvent]: ...


class Inbox(Protocol):
    """Where calls come from; `get` gives None at the end and raises `queue.Empty` if it may not wait."""

    def get(self, *, block: bool) -> Call | Reply | None: ...
    def put(self, message: Call | Reply | None) -> None: ...
    def empty(self) -> bool: ...


Send = Callable[[list[Reply | Token]], None]


class Loop:
    """Takes calls from an inbox, lets the engine work, sends what comes of it."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        send: Send,
        prepare: Callable[[str], BaseModel],
        clock: Callable[[], float] = time.perf_counter,
        progress: Progress | None = None,
    ) -> None:
        self._engine, self._inbox, self._send, self._clock = engine, inbox, send, clock
        self._progress = progress or Progress.alone()
        self._prepare = prepare
        self._line: deque[Call] = deque()
        self._pass: tuple[Call, Generator[None, None, PassResult], float] | None = None
        self._samples: set[int] = set()
        self._out: list[Reply | Token] = []

    def run(self) -> None:
        """Until the inbox gives None."""
        while self._receive():
            spent = self._advance_line()
            self._sample_for(spent)
            self._flush()

    @property
    def _idle(self) -> bool:
        return not (self._line or self._pass or self._engine.sampling)

    def _receive(self) -> bool:
        """Take what has come; wait for something if there is nothing to do."""
        block = self._idle
        while True:
            try:
                call = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if call is None:
                return False
            self._accept(call)
            block = False

    def _accept(self, call: Call | Reply) -> None:
        if isinstance(call, Reply):  # something that went on beside
            self._out.append(call)
        elif call.lane == "line":
            self._line.append(call)
        elif call.lane == "sample":
            self._add_sample(call)
        elif call.method == "cancel_sample":
            self._samples.discard(call.args[0])
            self._engine.cancel_sample(str(call.args[0]))
        else:
            self._run(call)

    def _advance_line(self) -> float:
        """One piece of the pass under way, or the next call in line; the seconds it took."""
        if self._pass is None and not self._line:
            return 0.0
        started = self._clock()
        if self._pass is None:
            call = self._line.popleft()
            if call.method != "run_pass":
                self._run(call)
                return self._clock() - started
            self._progress.begin(call.call_id)
            try:
                self._pass = (call, self._engine.run_pass(*call.args), 0.0)
            except Exception as error:
                self._out.append(Reply(call.call_id, error=_portable(error)))
                return self._clock() - started
        call, pieces, worked = self._pass
        reply: Reply | None = None
        self._progress.begin(call.call_id)
        try:
            next(pieces)
        except StopIteration as finished:
            reply = Reply(call.call_id, finished.value)
        except Exception as error:
            reply = Reply(call.call_id, error=_portable(error))
        self._progress.end()
        spent = self._clock() - started
        if reply is None:
            self._pass = (call, pieces, worked + spent)
        else:
            self._pass = None
            self._out.append(Reply(reply.call_id, reply.value, reply.error, worked + spent))
        return spent

    def _sample_for(self, seconds: float) -> None:
        """Sample as long as training has just worked, at least one step: neither waits for the other."""
        until = self._clock() + seconds
        while self._engine.sampling:
            self._flush()  # what is done is told before anything else can go wrong
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

    def _add_sample(self, call: Call) -> None:
        try:
            self._engine.add_sample(str(call.call_id), call.args[0])
            self._samples.add(call.call_id)
        except Exception as error:
            self._out.append(Reply(call.call_id, error=_portable(error)))

    def _report(self, event: SampleEvent) -> None:
        call_id = int(event.job_id)
        if call_id not in self._samples:
            return
        if event.token is not None and event.logprob is not None:
            self._out.append(Token(call_id, event.index, event.token, event.logprob))
            return
        self._samples.discard(call_id)
        error = None if event.error is None else _portable(event.error)
        self._out.append(Reply(call_id, event.result, error))

    def _run(self, call: Call) -> None:
        started = self._clock()
        loads = call.method == "add_base_model"  # it may be fetched from afar
        self._progress.begin(UNTIMED if loads else call.call_id)
        try:
            run = self._add_model if loads else getattr(self._engine, call.method)
            value = run(*call.args, **call.options)
        except Exception as error:
            self._out.append(Reply(call.call_id, error=_portable(error)))
            return
        finally:
            self._progress.end()
        if call.method == "snapshot":
            threading.Thread(target=self._write, args=(call.call_id, value)).start()
            return
        self._out.append(Reply(call.call_id, value, seconds=self._clock() - started))

    def _write(self, call_id: int, write: Callable[[], int]) -> None:
        """Write a snapshot while the engine goes on; its weights were copied before."""
        try:
            reply = Reply(call_id, write())
        except Exception as error:
            reply = Reply(call_id, error=_portable(error))
        self._inbox.put(reply)

    def _add_model(self, name: str) -> BaseModel:
        model = self._prepare(name)
        self._engine.load(model)
        return model

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._send(out)


def _portable(error: Exception) -> Exception:
    """An error that survives the pipe: ours and Python's do, those of libraries are told by name."""
    plain = isinstance(error, OSError | MemoryError) and type(error).__module__ == "builtins"
    if plain or isinstance(error, TinkerError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


# -- the pipe ------------------------------------------------------------------------------------


def encode_frame(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=5)
    return _LENGTH.pack(len(data)) + data


def _read_frame(connection: socket.socket) -> Any:
    """The next frame; None when the other side is gone."""
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
    connection: socket.socket, *, alone: bool = False, progress: Progress | None = None
) -> None:
    """Be the engine at the end of a pipe, until the other end closes.

    `alone` means that this process exists for nothing else, so that it can leave in the middle of its work.
    """
    with connection:
        setup = _read_frame(connection)
        if not isinstance(setup, Setup):
            return
        if alone:
            threading.Thread(target=_leave_with, args=(connection,), daemon=True).start()
        with _Pipe(connection) as inbox, contextlib.suppress(ConnectionError):
            _work(setup, inbox, lambda value: connection.sendall(encode_frame(value)), progress)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _leave_with(connection: socket.socket) -> None:
    """End the process when the other end of the pipe closes: nobody waits for what is being computed."""
    watch = select.poll()
    watch.register(connection, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    watch.poll()
    os._exit(0)


class _Pipe:
    """Calls straight from the pipe: a thread between would cost each of them a wake-up more."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        self._closed = False
        self._beside: deque[Call | Reply | None] = deque()
        self._woken, self._wake = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._woken.close()
        self._wake.close()

    def put(self, message: Call | Reply | None) -> None:
        """Say something from another thread."""
        self._beside.append(message)
        with contextlib.suppress(OSError):  # the loop has ended
            self._wake.send(b"!")

    def empty(self) -> bool:
        return not (self._beside or self._whole_frame() or self._poll.poll(0))

    def get(self, *, block: bool) -> Call | Reply | None:
        """The next message; None when the other end is gone."""
        while True:
            if self._beside:
                self._woken.recv(1)
                return self._beside.popleft()
            if size := self._whole_frame():
                frame = pickle.loads(self._received[_LENGTH.size : size])  # noqa: S301 - our parent's
                del self._received[:size]
                return cast("Call", frame)
            if self._closed:
                return None
            ready = self._poll.poll(None if block else 0)
            if not ready:
                raise queue.Empty
            if any(descriptor == self._connection.fileno() for descriptor, _ in ready):
                self._receive()

    def _whole_frame(self) -> int:
        """Where the first frame ends, once all of it is there."""
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


def _work(
    setup: Setup, inbox: Inbox, send: Callable[[Any], None], progress: Progress | None
) -> None:
    try:
        engine, ready = _set_up(setup)
    except Exception as error:
        send(Ready(error=_portable(error)))
        return
    send(ready)
    Loop(engine, inbox, send, partial(_prepare, setup), progress=progress).run()


def _set_up(setup: Setup) -> tuple[Engine, Ready]:
    models = [_prepare(setup, text) for text in setup.base_models]
    if setup.engine == "fake":
        from .fake import FakeEngine

        return FakeEngine(models, detokenize=_Detokenizer()), Ready(models, "none", "float32")
    import torch

    from .engine import TorchEngine

    device = _device(setup.device)
    dtype = _dtype(setup.dtype, device)
    engine = TorchEngine(
        models,
        device=device,
        dtype=getattr(torch, dtype),
        detokenize=_Detokenizer(),
        loss_limits=setup.loss_limits,
    )
    for model in models:
        engine.load(model)
    return engine, Ready(models, device, dtype)


def _prepare(setup: Setup, text: str) -> BaseModel:
    return base_models.prepare(base_models.parse_spec(text), setup.cache_dir, progress=_tell)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - progress of a long start


def _device(wanted: str) -> str:
    import torch

    if wanted != "auto":
        return wanted
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _dtype(wanted: str, device: str) -> str:
    if wanted != "auto":
        return wanted
    return "float32" if device in {"cpu", "mps"} else "bfloat16"


class _Detokenizer:
    """Text of token ids, for stop strings; tokenizers are read when first needed."""

    def __init__(self) -> None:
        self._tokenizers: dict[Path, Any] = {}

    def __call__(self, model: BaseModel, ids: Sequence[int]) -> str:
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


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then ends us
    descriptor, *watched = map(int, sys.argv[1:])
    progress = None
    if watched:
        progress = Progress.of_descriptor(watched[0])
        die_with(watched[1])
        be_killed_first()
    serve(socket.socket(fileno=descriptor), alone=True, progress=progress)
