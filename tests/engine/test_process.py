"""The engine process: order of calls, shares of time, and replies to every caller."""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinkex.engine.base_models import PreparedModel
from tinkex.engine.calls import (
    AddBaseModel,
    AddSample,
    CallFrame,
    CancelSample,
    CloseSampler,
    CreateModel,
    EngineCall,
    OpenSampler,
    OptimStep,
    Reply,
    RestoreModel,
    RunPass,
    SaveState,
    TakeSnapshot,
    Token,
    UnloadModel,
)
from tinkex.engine.interface import EngineFailedError
from tinkex.engine.process import (
    Loop,
    Ready,
    Setup,
    _check_gpu,
    _portable,
    encode_frame,
    serve,
)
from tinkex.engine.values import (
    AdamStep,
    Example,
    LoraSpec,
    PassJob,
    PassResult,
    SampledResult,
    SampleEvent,
    SampleJob,
    TracedGraph,
)
from tinkex.errors import ConfigError, InvalidInputError, NotFoundError

BASE = PreparedModel("base", Path("nowhere"), 32, 23, "none", False, ())
PATIENCE = 120.0  # seconds that a thread or process may take to end


# -- an engine that records its calls ----------------------------------------------------------------


class ForeignError(OSError):
    """An error of a library that cannot be unpickled, because its constructor needs more than the message."""

    def __init__(self, message: str, *, response: object) -> None:
        super().__init__(message)
        self.response = response


class Diary:
    """An engine that only advances a fake clock by the given seconds and records its calls in `entries`.

    A pass has one piece per example. `when[entry]` is called when `entry` is recorded for the first time, so that a
    test can act in the middle of the engine's work.
    """

    def __init__(self, *, piece: float = 0.0, step: float = 0.0, call: float = 0.0) -> None:
        self.now = 100.0
        self.piece, self.step, self.call = piece, step, call
        self.entries: list[str] = []
        self.when: dict[str, Callable[[], object]] = {}
        self.jobs: dict[str, SampleJob] = {}
        self.drawn: dict[str, int] = defaultdict(int)
        self.write_snapshot: Callable[[], int] = lambda: 42
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def note(self, entry: str, seconds: float = 0.0) -> None:
        self.now += seconds
        self.entries.append(entry)
        if (happens := self.when.pop(entry, None)) is not None:
            happens()

    # -- the engine's methods

    def load(self, model: PreparedModel) -> None:
        self.note(f"load {model.name}")

    def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> None:
        self.note(f"create {model_id}", self.call)

    def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> None:
        self.note(f"restore {model_id} optimizer={optimizer}")

    def restore_snapshot(self, model_id: str, base_model: str, directory: Path) -> None:
        self.note(f"restore snapshot {model_id}")

    @property
    def shared_passes(self) -> None:
        return None

    def unload_model(self, model_id: str) -> None:
        self.note(f"unload {model_id}")
        raise ForeignError("no", response=object())

    def run_pass(self, model_id: str, request: PassJob) -> Generator[None, None, PassResult]:
        if model_id == "missing":
            raise NotFoundError("There is no model 'missing'.")
        return self._pass(model_id, request)

    def _pass(self, model_id: str, request: PassJob) -> Generator[None, None, PassResult]:
        for number, _ in enumerate(request.examples):
            if request.loss_fn == f"fails at {number}":
                raise InvalidInputError("is wrong", field="data")
            self.note(f"{model_id} {number}", self.piece)
            yield
        self.note(f"{model_id} done")
        return PassResult([], {"pieces": float(len(request.examples))})

    def check_traced(self, graph: TracedGraph) -> None:
        self.note(f"check {graph.name}")

    def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]:
        self.note(f"step {model_id}", self.call)
        return {"grad_norm": 1.0}

    def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int:
        self.note(f"save {model_id}")
        raise ZeroDivisionError("by zero")

    def snapshot(self, model_id: str, directory: Path) -> Callable[[], int]:
        self.note(f"snapshot {model_id}")
        return self.write_snapshot

    def open_sampler(
        self,
        sampler_id: str,
        base_model: str,
        *,
        model_id: str | None = None,
        directory: Path | None = None,
    ) -> None:
        self.note(f"open {sampler_id}", self.call)

    def close_sampler(self, sampler_id: str) -> None:
        self.note(f"close {sampler_id}")
        raise FileNotFoundError(2, "not there", sampler_id)

    def add_sample(self, job_id: str, job: SampleJob) -> None:
        if job.sampler_id == "missing":
            raise NotFoundError("There is no sampler 'missing'.")
        self.note(f"add {job_id}")
        self.jobs[job_id] = job

    def cancel_sample(self, job_id: str) -> None:
        self.note(f"cancel {job_id}")
        self.jobs.pop(job_id, None)

    @property
    def sampling(self) -> bool:
        return bool(self.jobs)

    def sample_step(self) -> list[SampleEvent]:
        events = []
        for job_id, job in list(self.jobs.items()):
            self.drawn[job_id] += 1
            number = self.drawn[job_id]
            if job.stream:
                events.append(SampleEvent(job_id, token=number, logprob=-float(number)))
            if job.temperature < 0:
                events.append(SampleEvent(job_id, error=ForeignError("bad", response=object())))
                del self.jobs[job_id]
            elif number == job.max_tokens:
                tokens = [np.arange(number)]
                events.append(SampleEvent(job_id, SampledResult(tokens, tokens, ["length"])))
                del self.jobs[job_id]
        self.note("draw", self.step)
        return events

    # -- for tests

    def put(self, *calls: CallFrame) -> None:
        for call in calls:
            self.inbox.put(call)

    def work(self, *calls: CallFrame, replies: int) -> list[list[Reply | Token]]:
        """Run a loop until it has sent `replies` replies; return everything it sent."""
        sent: list[list[Reply | Token]] = []

        def send(messages: list[Reply | Token]) -> None:
            sent.append(messages)
            if sum(isinstance(message, Reply) for part in sent for message in part) >= replies:
                self.inbox.put(None)

        self.put(*calls)
        Loop(self, self.inbox, send, lambda name: BASE, clock=lambda: self.now).run()
        return sent


def pieces(count: int, loss_fn: str = "cross_entropy") -> PassJob:
    return PassJob([Example(np.zeros(1), {})] * count, loss_fn)


def passing(call_id: int, model_id: str, count: int) -> CallFrame:
    return CallFrame(call_id, RunPass(model_id, pieces(count)))


def drawing(call_id: int, max_tokens: int = 1, **options: Any) -> CallFrame:
    job = SampleJob("s", np.zeros(1, np.int32), max_tokens=max_tokens, **options)
    return CallFrame(call_id, AddSample(job))


def by_id(sent: list[list[Reply | Token]]) -> dict[int, Reply]:
    return {
        message.call_id: message for part in sent for message in part if isinstance(message, Reply)
    }


# -- order and shares of time ------------------------------------------------------------------------


def test_calls_in_line_run_in_order():
    engine = Diary()
    sent = engine.work(
        passing(1, "a", 2),
        CallFrame(2, OptimStep("a", AdamStep())),
        passing(3, "b", 1),
        CallFrame(4, RestoreModel("c", "base", Path("d"), optimizer=True)),
        replies=4,
    )
    assert engine.entries == [
        "a 0",
        "a 1",
        "a done",
        "step a",
        "b 0",
        "b done",
        "restore c optimizer=True",
    ]
    assert list(by_id(sent)) == [1, 2, 3, 4]
    assert by_id(sent)[1].value == PassResult([], {"pieces": 2.0})
    assert by_id(sent)[2].value == {"grad_norm": 1.0}
    assert by_id(sent)[4].value is None


def test_reply_is_sent_as_soon_as_its_call_is_done():
    engine = Diary()
    sent = engine.work(*(CallFrame(n, OptimStep("a", AdamStep())) for n in range(3)), replies=3)
    assert [[message.call_id for message in part] for part in sent] == [[0], [1], [2]]


def test_quick_call_runs_between_two_micro_batches_of_a_pass():
    engine = Diary()
    engine.when["a 1"] = lambda: engine.put(
        CallFrame(9, OptimStep("a", AdamStep())), CallFrame(2, OpenSampler("s", "base"))
    )
    sent = engine.work(passing(1, "a", 3), replies=3)
    assert engine.entries == ["a 0", "a 1", "open s", "a 2", "a done", "step a"]
    assert list(by_id(sent)) == [2, 1, 9]


def test_seconds_of_a_pass_exclude_other_work():
    engine = Diary(piece=3.0, step=1.0, call=0.5)
    engine.when["a 0"] = lambda: engine.put(CallFrame(2, OpenSampler("s", "base")))
    sent = engine.work(
        drawing(5, max_tokens=20),
        passing(1, "a", 4),
        CallFrame(3, OptimStep("a", AdamStep())),
        replies=4,
    )
    assert by_id(sent)[1].seconds == 12.0
    assert by_id(sent)[2].seconds == by_id(sent)[3].seconds == 0.5


@pytest.mark.parametrize(
    ("piece", "step", "steps_per_piece"), [(8.0, 1.0, 8), (1.0, 2.0, 1), (5.0, 2.0, 3), (0, 1, 1)]
)
def test_samples_get_as_much_time_as_training(piece, step, steps_per_piece):
    engine = Diary(piece=piece, step=step)
    engine.work(drawing(1, max_tokens=10_000), passing(2, "a", 3), replies=1)
    turns = "".join("d" if entry == "draw" else "t" for entry in engine.entries[1:])
    assert turns.startswith(f"t{'d' * steps_per_piece}" * 3)


def test_new_pass_does_not_wait_for_running_samples():
    engine = Diary(step=1.0)
    engine.when["draw"] = lambda: engine.put(passing(2, "a", 1))
    engine.work(drawing(1, max_tokens=100), replies=2)
    assert engine.entries[:4] == ["add 1", "draw", "a 0", "draw"]


def test_new_sample_joins_the_running_ones():
    engine = Diary(piece=10.0, step=1.0)
    engine.when["draw"] = lambda: engine.put(drawing(2, max_tokens=2))
    sent = engine.work(drawing(1, max_tokens=4), passing(3, "a", 1), replies=2)
    assert engine.entries[:7] == ["add 1", "a 0", "draw", "add 2", "draw", "draw", "draw"]
    assert list(by_id(sent))[:2] == [2, 1]
    assert engine.drawn == {"1": 4, "2": 2}


def test_base_model_is_prepared_and_then_loaded():
    engine = Diary()
    sent = engine.work(CallFrame(1, AddBaseModel("hub/model")), replies=1)
    assert by_id(sent)[1].value == BASE
    assert engine.entries == ["load base"]


def test_snapshot_is_written_while_the_engine_works():
    engine = Diary()
    writing = threading.Event()

    def slow_write() -> int:
        assert writing.wait(PATIENCE)
        return 42

    engine.write_snapshot = slow_write
    engine.when["a done"] = writing.set
    sent = engine.work(CallFrame(1, TakeSnapshot("a", Path("d"))), passing(2, "a", 2), replies=2)
    assert list(by_id(sent)) == [2, 1]
    assert by_id(sent)[1].value == 42


# -- samples -----------------------------------------------------------------------------------------


def test_streamed_tokens_are_sent_one_by_one_before_the_result():
    engine = Diary()
    sent = engine.work(drawing(7, max_tokens=3, stream=True), replies=1)
    assert sent[:2] == [[Token(0, 1, -1.0, call_id=7)], [Token(0, 2, -2.0, call_id=7)]]
    token, reply = sent[2]
    assert token == Token(0, 3, -3.0, call_id=7)
    assert isinstance(reply, Reply)
    assert reply.value.stop_reasons == ["length"]


def test_streamed_tokens_are_sent_one_by_one_during_training():
    engine = Diary(piece=10.0, step=1.0)
    sent = engine.work(drawing(7, max_tokens=3, stream=True), passing(1, "a", 1), replies=2)
    assert [len(part) for part in sent] == [1, 1, 2, 1]


def test_cancelled_sample_gets_no_reply():
    engine = Diary()

    def cancel() -> None:
        engine.put(CallFrame(3, CancelSample(1)), CallFrame(4, CancelSample(99)))

    engine.when["draw"] = cancel
    sent = engine.work(drawing(1, max_tokens=50, stream=True), drawing(2, max_tokens=5), replies=1)
    assert engine.drawn == {"1": 1, "2": 5}
    assert list(by_id(sent)) == [2]
    assert sum(isinstance(message, Token) for part in sent for message in part) == 1


def test_sample_cancelled_before_its_first_step_is_never_drawn():
    engine = Diary()
    engine.work(drawing(1), CallFrame(2, CancelSample(1)), drawing(3), replies=1)
    assert engine.drawn == {"3": 1}


# -- errors ------------------------------------------------------------------------------------------


def portable(error: Exception | None) -> Exception:
    again: Exception = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    return again


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"),
    ],
)
def test_lack_of_memory_keeps_its_kind_on_the_pipe(error):
    sent = portable(_portable(error))
    assert isinstance(sent, MemoryError)
    assert str(sent) == str(error)


def test_error_is_sent_to_its_caller_and_the_loop_continues():
    engine = Diary()
    sent = engine.work(
        CallFrame(1, RunPass("missing", pieces(1))),
        CallFrame(2, RunPass("a", pieces(3, "fails at 0"))),
        CallFrame(3, RunPass("a", pieces(3, "fails at 2"))),
        CallFrame(4, SaveState("a", Path("d"), optimizer=True)),
        CallFrame(5, CloseSampler("s")),
        CallFrame(6, UnloadModel("a")),
        CallFrame(7, EngineCall()),
        CallFrame(9, AddSample(SampleJob("missing", np.zeros(1)))),
        drawing(10, max_tokens=9, temperature=-1.0),
        passing(11, "a", 1),
        replies=10,
    )
    errors = {
        call_id: portable(reply.error) for call_id, reply in by_id(sent).items() if call_id < 11
    }
    assert {call_id: (type(error).__name__, str(error)) for call_id, error in errors.items()} == {
        1: ("NotFoundError", "There is no model 'missing'. (status 404)"),
        2: ("InvalidInputError", "data: is wrong"),
        3: ("InvalidInputError", "data: is wrong"),
        4: ("EngineFailedError", "ZeroDivisionError: by zero"),
        5: ("FileNotFoundError", "[Errno 2] not there: 's'"),
        6: ("EngineFailedError", "ForeignError: no"),
        7: ("EngineFailedError", str(errors[7])),
        9: ("NotFoundError", "There is no sampler 'missing'. (status 404)"),
        10: ("EngineFailedError", "ForeignError: bad"),
    }
    assert "TypeError: no engine runs" in str(errors[7])
    assert isinstance(errors[4], EngineFailedError)
    assert errors[4].kind == "ZeroDivisionError"
    assert "Traceback" in errors[4].__notes__[0]
    assert isinstance(errors[2], InvalidInputError)
    assert errors[2].field == "data"
    assert by_id(sent)[11].value == PassResult([], {"pieces": 1.0})


def test_finished_replies_are_sent_before_a_step_that_crashes_the_engine():
    engine = Diary()

    def break_down() -> None:
        raise SystemError("the device is lost")

    engine.when["draw"] = break_down
    sent: list[list[Reply | Token]] = []
    engine.put(passing(1, "a", 0), drawing(2))
    with pytest.raises(SystemError):
        Loop(engine, engine.inbox, sent.append, lambda name: BASE, clock=lambda: engine.now).run()
    assert by_id(sent)[1].value == PassResult([], {"pieces": 0.0})


# -- rest --------------------------------------------------------------------------------------------


def test_idle_loop_rests_once_after_each_piece_of_work():
    engine = Diary()
    again = [passing(2, "a", 1), None]

    def rest() -> None:
        engine.note("rest")
        engine.inbox.put(again.pop(0))

    engine.put(passing(1, "a", 1))
    Loop(
        engine, engine.inbox, lambda sent: None, lambda name: BASE, rest=rest, rest_after=0.0
    ).run()
    assert engine.entries == ["a 0", "a done", "rest"] * 2


# -- the end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["a 1", "draw", "add 2"])
def test_loop_ends_in_the_middle_of_its_work(entry):
    engine = Diary(piece=5.0, step=1.0)
    engine.when[entry] = lambda: engine.inbox.put(None)
    assert engine.work(passing(1, "a", 100), drawing(2, max_tokens=100), replies=3) == []
    assert len(engine.entries) < 30


# -- the pipe ----------------------------------------------------------------------------------------


class Pipe:
    """The service's end of the pipe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages: list[Any] = []
        connection.settimeout(PATIENCE)

    def send(self, value: object) -> None:
        self._connection.sendall(encode_frame(value))

    def frame(self) -> Any:
        header = self._exactly(8)
        if header is None:
            return None
        return pickle.loads(self._exactly(struct.unpack("<Q", header)[0]) or b"")

    def reply(self) -> Any:
        """The next message; one frame can hold several."""
        while not self._messages:
            self._messages += self.frame()
        return self._messages.pop(0)

    def ask(self, call: CallFrame) -> Any:
        self.send(call)
        reply = self.reply()
        assert isinstance(reply, Reply)
        assert reply.call_id == call.call_id
        if reply.error is not None:
            raise reply.error
        return reply.value

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            part = self._connection.recv(size - len(data))
            if not part:
                return None
            data += part
        return data


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@contextmanager
def served() -> Iterator[tuple[Pipe, Any]]:
    """Run an engine in a thread; yields the service's end of the pipe, and a future that resolves when it ends."""
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as thread, ours:
        ending = thread.submit(serve, theirs)
        yield Pipe(ours), ending
        ours.close()


def fake(cache_dir: Path, *base_models: str) -> Setup:
    return Setup(base_models or ("tinkex/tiny",), cache_dir, "fake")


def example(length: int = 6) -> Example:
    tokens = np.arange(length, dtype=np.int32)
    return Example(tokens, {"target_tokens": tokens[::-1].astype(np.int64)})


def train(pipe: Pipe) -> None:
    """Request one training step and one sample over a pipe."""
    asked = PassJob([example()] * 3, "cross_entropy")
    pipe.ask(CallFrame(1, CreateModel("m", "tinkex/tiny", LoraSpec(4))))
    result = pipe.ask(CallFrame(2, RunPass("m", asked)))
    assert [len(logprobs) for logprobs in result.logprobs] == [6, 6, 6]
    assert pipe.ask(CallFrame(3, OptimStep("m", AdamStep())))["grad_norm"] > 0
    pipe.ask(CallFrame(4, OpenSampler("s", "tinkex/tiny", model_id="m")))
    job = SampleJob("s", np.arange(3, dtype=np.int32), 2, 4, stop_tokens=(), stream=True)
    pipe.send(CallFrame(5, AddSample(job)))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    while isinstance(message := pipe.reply(), Token):
        tokens[message.index].append(message.token)
    assert [row.tolist() for row in message.value.tokens] == [tokens[0], tokens[1]]
    assert message.value.stop_reasons == ["length", "length"]


def test_engine_serves_until_the_other_end_of_the_pipe_closes(cache_dir):
    with served() as (pipe, ending):
        pipe.send(fake(cache_dir))
        ready = pipe.frame()
        assert [model.name for model in ready.models] == ["tinkex/tiny"]
        assert ready.error is None
        train(pipe)
        with pytest.raises(NotFoundError):
            pipe.ask(CallFrame(6, OptimStep("nobody", AdamStep())))
        assert pipe.ask(CallFrame(7, AddBaseModel("twin=tinkex/tiny"))).name == "twin"
        pipe.close()
        assert ending.result(PATIENCE) is None


def test_engine_that_cannot_start_reports_the_error_and_ends(cache_dir):
    with served() as (pipe, ending):
        pipe.send(fake(cache_dir, "tinkex/tiny", "./not there"))
        ready = pipe.frame()
        assert isinstance(ready, Ready)
        assert isinstance(ready.error, InvalidInputError)
        assert "not there" in str(ready.error)
        assert pipe.frame() is None
        assert ending.result(PATIENCE) is None


@pytest.mark.parametrize("sent", [b"", b"\x01", encode_frame("hello")])
def test_engine_ends_if_it_receives_no_setup(sent):
    ours, theirs = socket.socketpair()
    with ours, ThreadPoolExecutor(1) as thread:
        ending = thread.submit(serve, theirs)
        ours.sendall(sent)
        ours.close()
        assert ending.result(PATIENCE) is None


def test_engine_ends_without_error_if_no_one_reads_its_replies(cache_dir):
    with served() as (pipe, ending):
        pipe.send(fake(cache_dir))
        pipe.frame()
        for number in range(200):  # some replies are still in the pipe when it closes
            pipe.send(CallFrame(number, CreateModel(f"m{number}", "tinkex/tiny", LoraSpec(4))))
        pipe.reply()
        pipe.close()
        assert ending.result(PATIENCE) is None


def test_engine_that_crashes_closes_the_pipe(cache_dir):
    with served() as (pipe, ending):
        pipe.send(fake(cache_dir))
        pipe.frame()
        pipe.send("no frame")
        assert pipe.frame() is None
        assert isinstance(ending.exception(PATIENCE), AttributeError)


# -- the process -------------------------------------------------------------------------------------


@contextmanager
def spawned() -> Iterator[tuple[Pipe, subprocess.Popen[bytes]]]:
    """Start an engine in its own process, as the service does."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tinkex.engine", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
            )
        with process:
            try:
                yield Pipe(ours), process
            finally:
                process.kill()


def last_words(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    _, words = process.communicate(timeout=PATIENCE)
    return process.returncode, words


def test_process_ignores_ctrl_c_and_ends_when_its_pipe_closes(cache_dir):
    with spawned() as (pipe, process):
        pipe.send(fake(cache_dir))
        assert pipe.frame().error is None
        process.send_signal(signal.SIGINT)
        train(pipe)
        pipe.close()
        assert last_words(process) == (0, b"")


def test_process_ends_in_the_middle_of_a_pass_when_its_pipe_closes(cache_dir):
    with spawned() as (pipe, process):
        pipe.send(fake(cache_dir))
        pipe.frame()
        pipe.ask(CallFrame(1, CreateModel("m", "tinkex/tiny", LoraSpec(4))))
        pipe.ask(CallFrame(2, OpenSampler("s", "tinkex/tiny")))
        # The pass takes minutes; the first token shows that it has started.
        endless = PassJob([example(256)] * 10_000, "cross_entropy")
        pipe.send(CallFrame(3, RunPass("m", endless)))
        job = SampleJob("s", np.arange(3, dtype=np.int32), 1, 5, stop_tokens=(), stream=True)
        pipe.send(CallFrame(4, AddSample(job)))
        assert isinstance(pipe.reply(), Token)
        pipe.close()
        assert last_words(process) == (0, b"")


def test_process_ends_while_loading_when_its_pipe_closes(cache_dir, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "slow"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    endless = tmp_path / "model.safetensors.index.json"
    os.mkfifo(endless)
    with spawned() as (pipe, process):
        pipe.send(fake(cache_dir, f"slow={tmp_path}"))
        with endless.open("w"):  # returns once the engine opens the pipe for reading
            pipe.close()
            assert last_words(process) == (0, b"")


def test_process_reports_why_it_cannot_start(cache_dir):
    with spawned() as (pipe, process):
        pipe.send(fake(cache_dir, "two words"))
        assert isinstance(pipe.frame().error, InvalidInputError)
        assert last_words(process) == (0, b"")


def test_gpu_that_is_not_there_is_refused_with_the_number_of_those_that_are():
    _check_gpu("cpu", 0)
    _check_gpu("cuda", 1)
    _check_gpu("cuda:1", 2)
    for device, count in (("cuda", 0), ("cuda:2", 2)):
        with pytest.raises(ConfigError, match=f"{device} is not there: torch finds {count} "):
            _check_gpu(device, count)
